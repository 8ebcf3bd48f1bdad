#!/usr/bin/env bash
# Makes the venv in which the real SGLang server runs on a CPU (deploy/sglang/README.md); instant when it is there.
#
#   bash scripts/setup_sglang.sh                                # into .venv-sglang of this repository
#   AGENTRL_SGLANG_VENV=/opt/sglang bash scripts/setup_sglang.sh
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${AGENTRL_SGLANG_VENV:-$root/.venv-sglang}"
python="${PYTHON:-python3}"
requirements="$root/deploy/sglang/requirements-cpu.txt"
nodeps="$root/deploy/sglang/requirements-cpu-nodeps.txt"
stamp="$venv/.requirements.sha256"
wanted="$(cat "$requirements" "$nodeps" | sha256sum | cut -d' ' -f1)"

if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    echo "sglang venv: $venv (up to date)"
    exit 0
fi

# One installer at a time; a second one waits here and then finds the stamp.
mkdir -p "$venv"
exec 9>"$venv/.install.lock"
if ! flock --wait 900 9; then
    echo "setup_sglang: another installation has held $venv/.install.lock for 15 minutes" >&2
    exit 1
fi
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    echo "sglang venv: $venv (up to date)"
    exit 0
fi

echo "sglang venv: installing into $venv (about 1.6 GB, one to three minutes)"
rm -f "$stamp"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$requirements"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$nodeps"
printf '%s\n' "$wanted" >"$stamp"
echo "sglang venv: $venv (installed)"
