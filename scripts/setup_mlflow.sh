#!/usr/bin/env bash
# Create a venv with an MLflow server, for tests and for a look at traces (docs/tracing.md).
#
#   bash scripts/setup_mlflow.sh                                # into .venv-mlflow in this repository
#   AGENTRL_MLFLOW_VENV=/opt/mlflow bash scripts/setup_mlflow.sh
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
venv="${AGENTRL_MLFLOW_VENV:-.venv-mlflow}"
if [ ! -x "$venv/bin/mlflow" ]; then
  step python3 -m venv "$venv"
  step "$venv/bin/pip" install --quiet "mlflow>=3.6,<4"
fi
printf '%q server --host 127.0.0.1 --port 5000 --backend-store-uri sqlite:///mlflow.db\n' "$venv/bin/mlflow"
