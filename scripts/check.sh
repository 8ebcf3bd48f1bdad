#!/usr/bin/env bash
# Check this machine and, with the flags of a run, its database, model, tool servers and engine: `agentrl doctor`.
#
#   bash scripts/check.sh [--flag VALUE …]
#
# The exit code is 1 if a check failed; the table says how to fix it.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

step bash scripts/setup.sh
exec "${AGENTRL_VENV:-.venv}/bin/python" -m agentrl doctor "$@"
