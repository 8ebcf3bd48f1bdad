#!/usr/bin/env bash
# Create the venv for environments of verifiers (assets/examples/verifiers); do nothing if it is there.
#
#   bash scripts/setup_verifiers.sh                                    # into .venv-verifiers in this repository
#   bash scripts/setup_verifiers.sh my-environment==1.0 …              # and packages of more environments
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-verifiers"
wanted="verifiers[rg]==0.3.1 $*"
if [[ -f "$venv/.installed" && "$(cat "$venv/.installed")" == "$wanted" ]]; then
    echo "verifiers venv: $venv (up to date)"
    exit
fi
echo "verifiers venv: installing into $venv (about 0.7 GB, one to three minutes)"
step "${PYTHON:-python3}" -m venv "$venv"
step "$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'verifiers[rg]==0.3.1' "$@"
printf '%s' "$wanted" >"$venv/.installed"
