#!/usr/bin/env bash
# Train with GRPO (arXiv 2402.03300).
#
#   bash scripts/grpo.sh RUN_NAME [--flag VALUE …]
#   MODEL_PATH=/models/Qwen3-4B TRAIN_FILE=tasks.jsonl ENGINE=sglang bash scripts/grpo.sh my_run
#
# The environment variables are listed in scripts/lib/run.sh; further flags override those below.
set -euo pipefail
. "$(dirname "$0")/lib/run.sh"

choose_model_and_tasks TRAIN_FILE assets/tasks/calculator_train.jsonl
training_flags 5 200
flags+=(
  --loss_calculater GRPO --token_level_loss true --balance_sample true
  --epsilon 0.2 --epsilon_higher 0.1 --importance_weight_cap_ratio 4
  "$@"
)

launch train
