#!/usr/bin/env bash
# Train a small model to answer by Python programs that the sandbox runs. Run it from the repository's root.
#
#   bash assets/examples/sandbox/run.sh                    make the model once, then 16 steps
#   bash assets/examples/sandbox/run.sh --max_steps 60     further flags go to every process
#
# Ctrl-C stops everything; the same command resumes. RUN_NAME names the run.
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON="${AGENTRL_VENV:-.venv}/bin/python"
[ -x "$PYTHON" ] || { echo "$PYTHON is not there: run bash scripts/setup.sh first" >&2; exit 1; }
"$PYTHON" -m agentrl.base.installation examples/sandbox/prepare.py
SAMPLERS="${SAMPLERS:-1}" exec "$PYTHON" -m agentrl launch train --run_name "${RUN_NAME:-sandbox}" \
  --config assets/examples/sandbox/run.yml "$@"
