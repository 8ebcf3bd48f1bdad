#!/usr/bin/env bash
# Create the venv for servers of OpenEnv, such as assets/examples/openenv; do nothing if it is there.
#
#   bash scripts/setup_openenv.sh        # into .venv-openenv in this repository: 0.15 GB, about 15 s
#
# Without gradio and what else of the package's requirements a server does not import.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
. "$(dirname "$0")/lib/install.sh"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-openenv"
package="openenv==0.10.0"
needed=('fastapi>=0.116' 'fastmcp>=3,<4' 'httpx>=0.28' packaging requests uvicorn 'websockets>=15')
wanted="$package ${needed[*]}"
if [[ -f "$venv/.installed" && "$(cat "$venv/.installed")" == "$wanted" ]]; then
    echo "openenv venv: $venv (up to date)"
    exit
fi
step "${PYTHON:-python3}" -m venv "$venv"
install_into "$venv" "${needed[@]}"
install_into "$venv" --no-deps "$package"
printf '%s' "$wanted" >"$venv/.installed"
