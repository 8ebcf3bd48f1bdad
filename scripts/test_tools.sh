#!/usr/bin/env bash
# Run 64 trajectories at once against five public MCP servers; check that state never crosses trajectories.
#
#   bash scripts/test_tools.sh                                  # servers into .venv-mcp in this repository
#   bash scripts/test_tools.sh --trajectories 16                # fewer of them
#   AGENTRL_MCP_SERVERS=/opt/mcp bash scripts/test_tools.sh     # servers into that folder
#
# The servers: everything, filesystem and memory (npm), time and sqlite (PyPI). Needs node 18 or later.
# The last line is `N violations`; the exit code is 0 if N is 0.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh
folder="${AGENTRL_MCP_SERVERS:-$PWD/.venv-mcp}"
requirements="deploy/mcp/requirements.txt"
stamp="$folder/.requirements.sha256"
wanted="$(cat "$requirements" deploy/mcp/package.json | sha256sum | cut -d' ' -f1)"
if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$wanted" ]]; then
  command -v npm >/dev/null || { echo "test_tools: npm is missing; install node 18 or later" >&2; exit 2; }
  echo "MCP servers: installing into $folder (about 250 MB, a minute)"
  mkdir -p "$folder"
  rm -f "$stamp"
  cp deploy/mcp/package.json "$folder/"
  step npm install --prefix "$folder" --no-audit --no-fund --loglevel=error
  step "${PYTHON:-python3}" -m venv "$folder/venv"
  step "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$requirements"
  printf '%s\n' "$wanted" >"$stamp"
fi
export AGENTRL_MCP_SERVERS="$folder" PYTHONPATH="$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "${AGENTRL_VENV:-.venv}/bin/python" -m public_tools "$@"
