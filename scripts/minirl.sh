#!/usr/bin/env bash
# Train with the original's MINIRL. --recipe minirl takes that of arXiv 2512.01374.
#
#   bash scripts/minirl.sh RUN_NAME [--flag VALUE …]
#   MODEL_PATH=/models/Qwen3-4B TRAIN_FILE=tasks.jsonl ENGINE=sglang bash scripts/minirl.sh my_run
#
# The environment variables are listed in scripts/lib/run.sh; further flags override those of assets/recipes/original-minirl.yml.
set -euo pipefail
. "$(dirname "$0")/lib/run.sh"
launch train original-minirl "$@"
