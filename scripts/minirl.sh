#!/usr/bin/env bash
# Train with MINIRL (arXiv 2512.01374).
#
#   bash scripts/minirl.sh RUN_NAME [--flag VALUE …]
#   MODEL_PATH=/models/Qwen3-4B TRAIN_FILE=tasks.jsonl ENGINE=sglang bash scripts/minirl.sh my_run
#
# The environment variables are listed in scripts/lib/run.sh; further flags override those below.
set -euo pipefail
. "$(dirname "$0")/lib/run.sh"

choose_model_and_tasks TRAIN_FILE assets/tasks/calculator_train.jsonl
training_flags 10 100
flags+=(
  --loss_calculater MINIRL --token_level_loss false --strict_in_bound true --skip_length_normalization true
  --epsilon 0.2 --epsilon_higher 0.1
  --balance_sample false
  "$@"
)

launch train
