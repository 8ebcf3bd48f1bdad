#!/usr/bin/env bash
# Train with the original's GRPO: advantages leave one out and are doubled. --recipe grpo takes that of arXiv 2402.03300.
#
#   bash scripts/grpo.sh RUN_NAME [--flag VALUE …]
#   MODEL_PATH=/models/Qwen3-4B TRAIN_FILE=tasks.jsonl ENGINE=sglang bash scripts/grpo.sh my_run
#
# The environment variables are listed in scripts/lib/run.sh; further flags override those of assets/recipes/original-grpo.yml.
set -euo pipefail
. "$(dirname "$0")/lib/run.sh"
launch train original-grpo "$@"
