#!/usr/bin/env bash
# Evaluate a model on an evaluation file and report; nothing is trained (docs/evaluation.md).
#
#   bash scripts/eval.sh RUN_NAME [--flag VALUE …]
#   MODEL_PATH=output/my_run/weights/v000120 EVAL_FILE=eval.jsonl ENGINE=sglang bash scripts/eval.sh my_eval
#
# The environment variables are listed in scripts/lib/run.sh; further flags override those of assets/recipes/eval.yml.
set -euo pipefail
. "$(dirname "$0")/lib/run.sh"
launch eval eval "$@"
