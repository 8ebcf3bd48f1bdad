#!/usr/bin/env bash
# Look back at a small run: fork it, train its steps with another loss, blame, withdraw. Run it from the clone's root.
#
#   bash assets/examples/past_runs/run.sh                  two to three minutes on two cores
#   RUN_NAME=again bash assets/examples/past_runs/run.sh   once more, with other names
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON="${AGENTRL_VENV:-.venv}/bin/python"
export PYTHONPATH="assets/examples/past_runs${PYTHONPATH:+:$PYTHONPATH}"
run="${RUN_NAME:-past}"
config=assets/examples/past_runs/run.yml
[ -x "$PYTHON" ] || { echo "$PYTHON is not there: run bash scripts/setup.sh first" >&2; exit 1; }
agentrl() {
  printf '\n$ agentrl %s\n' "$*"
  "$PYTHON" -m agentrl "$@"
}
"$PYTHON" -m agentrl.base.installation examples/past_runs/prepare.py

# Six steps, with checkpoints of steps 3 and 6; then how good the first and the last weights are on held-out tasks.
agentrl launch train --run_name "$run" --config "$config"
held_out=(--eval_file .agentrl/examples/past_runs/held_out.jsonl --eval_samples 4 --eval_engine own)
agentrl eval --run_name "$run" --config "$config" "${held_out[@]}" --eval_version 0
agentrl eval --run_name "$run" --config "$config" "${held_out[@]}" --eval_version 6

# Fork: go on from step 3 with new samples and another learning rate.
agentrl fork "$run" "${run}_fork" --from_step 3
agentrl launch train --run_name "${run}_fork" --config "$config" --learning_rate 5e-4

# What if: the same six steps with another loss. No engine, no sampler, no new sample.
agentrl whatif "$run" "${run}_gspo" --loss_calculater GSPO

# Blame: which trajectories moved the held-out score? The ids of five of them go into a file.
blamed=".agentrl/examples/past_runs/$run-blamed.txt"
rm -f "$blamed"
agentrl blame "$run" 0 6 --changes all --top 5 --out "$blamed"
agentrl whatif "$run" "${run}_without" --without "$blamed"

# Withdraw these five for good: delete them, go back to before them, train the later steps again, and prove it.
agentrl runs rm "${run}_fork" "${run}_gspo" "${run}_without" --yes
mapfile -t records <"$blamed"
agentrl retract "$run" "${records[@]/#/--record=}" --because "an example" --rebuild --yes
agentrl train --run_name "$run" --config "$config"
agentrl db check --run_name "$run" --output_dir "output/$run"
