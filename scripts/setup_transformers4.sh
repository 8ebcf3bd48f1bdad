#!/usr/bin/env bash
# Create the venv in which published models are read by transformers 4, as many users and engines do; do nothing if it
# is there.
#
#   bash scripts/setup_transformers4.sh        # into .venv-transformers4 in this repository: 0.15 GB, about 15 s
#
# What transformers 4 shares with the clone's own venv, such as torch, is read from there.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
. "$(dirname "$0")/lib/install.sh"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-transformers4"
packages=(transformers==4.57.6 huggingface_hub==0.36.0 tokenizers==0.22.2)
wanted="${packages[*]}"
if [[ -f "$venv/.installed" && "$(cat "$venv/.installed")" == "$wanted" ]]; then
    echo "transformers 4 venv: $venv (up to date)"
    exit
fi
step "${PYTHON:-python3}" -m venv "$venv"
install_into "$venv" --no-deps "${packages[@]}"
folder="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
printf '%s\n' "${folder/#"$venv"/"$(venv_of "$root")"}" >"$folder/shared.pth"
printf '%s' "$wanted" >"$venv/.installed"
