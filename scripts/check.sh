#!/usr/bin/env bash
# Check this machine and, with the flags of a run, its database, model, tool servers and engine: `agentrl doctor`.
#
#   bash scripts/check.sh [--flag VALUE …]
#
# The exit code is 1 if a check failed; the table says how to fix it.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
root=$(cd "$(dirname "$0")/.." && pwd)

step bash "$root/scripts/setup.sh"
exec "$(venv_of "$root")/bin/python" -m agentrl doctor "$@"
