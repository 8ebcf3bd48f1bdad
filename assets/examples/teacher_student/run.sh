#!/usr/bin/env bash
# Distil a small teacher into a student, then train preferences on what the student sampled. From the clone's root.
#
#   bash assets/examples/teacher_student/run.sh                  one to two minutes on two cores
#   RUN_NAME=again bash assets/examples/teacher_student/run.sh   once more, with other names
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON="${AGENTRL_VENV:-.venv}/bin/python"
export PYTHONPATH="assets/examples/past_runs${PYTHONPATH:+:$PYTHONPATH}"
run="${RUN_NAME:-student}"
[ -x "$PYTHON" ] || { echo "$PYTHON is not there: run bash scripts/setup.sh first" >&2; exit 1; }
agentrl() {
  printf '\n$ agentrl %s\n' "$*"
  "$PYTHON" -m agentrl "$@"
}
"$PYTHON" -m agentrl.base.installation examples/past_runs/prepare.py

# On-policy distillation: the student samples, the teacher says how likely each token is, no score is trained.
agentrl launch train --run_name "$run" --config assets/examples/past_runs/run.yml \
  --loss_calculater OPD --teacher .agentrl/examples/past_runs/teacher --columns teacher \
  --drop_zero_advantage false --min_score_spread 0

# Preferences: DPO on the best and the worst of each stored group. No engine, no sampler, no teacher.
agentrl whatif "$run" "${run}_dpo" --loss_calculater DPO --learning_rate 1e-4
agentrl db check --run_name "$run" --output_dir "output/$run"
