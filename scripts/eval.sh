#!/usr/bin/env bash
# Evaluate a model on an evaluation file and report; nothing is trained (docs/evaluation.md).
#
#   bash scripts/eval.sh RUN_NAME [--flag VALUE …]
#   MODEL_PATH=output/my_run/weights/v000120 EVAL_FILE=eval.jsonl ENGINE=sglang bash scripts/eval.sh my_eval
#
# The environment variables are listed in scripts/lib/run.sh; further flags override those below.
set -euo pipefail
. "$(dirname "$0")/lib/run.sh"

choose_model_and_tasks EVAL_FILE assets/tasks/calculator_eval.jsonl
flags+=(--eval_file "$EVAL_FILE" --eval_samples 4)
if [ -n "${DEMO:-}" ]; then
  flags+=(--max_turns 4 --max_prompt_tokens 2048 --prompt_reserve_tokens 256 --max_new_tokens 64)
else
  flags+=(--fit_context 161536 --fit_turns 200 --new_context discard_all)
  flags+=(--preferred_sampling_params '{"temperature": 1, "top_p": 1, "presence_penalty": 1.0}')
fi
flags+=("$@")

launch eval
