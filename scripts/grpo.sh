#!/usr/bin/env bash
# Train with GRPO (arXiv 2402.03300).
#
#   bash scripts/grpo.sh RUN_NAME [--flag VALUE …]
#   MODEL_PATH=/models/Qwen3-4B TRAIN_FILE=tasks.jsonl ENGINE=sglang bash scripts/grpo.sh my_run
#
# The environment variables are listed in scripts/lib/run.sh; further flags override those of assets/configs/grpo.yml.
set -euo pipefail
. "$(dirname "$0")/lib/run.sh"
launch train grpo "$@"
