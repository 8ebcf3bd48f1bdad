#!/usr/bin/env bash
# Create the venv for environments of verifiers (docs/environments.md); do nothing if it is there.
#
#   bash scripts/setup_verifiers.sh                                    # verifiers 0.4 into .venv-verifiers
#   bash scripts/setup_verifiers.sh my-environment==1.0 …              # and packages of your environments
#   bash scripts/setup_verifiers.sh 'verifiers[rg]==0.3.1' …           # for environments of vf.Environment
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
. "$(dirname "$0")/lib/install.sh"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-verifiers"
packages=("verifiers==0.4.0" "uv" "$@")
for given in "$@"; do
  case "$given" in verifiers[=[\<\>~]*) packages=("uv" "$@") ;; esac
done
wanted="${packages[*]}"
if [[ -f "$venv/.installed" && "$(cat "$venv/.installed")" == "$wanted" ]]; then
  echo "verifiers venv: $venv (up to date)"
  exit
fi
echo "verifiers venv: installing into $venv (about 0.6 GB, half a minute to three minutes)"
step "${PYTHON:-python3}" -m venv "$venv"
install_into "$venv" --no-compile "${packages[@]}"
# The chat program of verifiers 0.4 runs in an environment of its own, which uv makes: now, rather than in a rollout.
if [[ "$wanted" == "verifiers==0.4."* ]]; then
  PATH="$venv/bin:$PATH" step "$venv/bin/python" -c '
import asyncio
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import SubprocessConfig, provision_runtime

async def prepare():
    async with provision_runtime(SubprocessConfig()) as runtime:
        await runtime.prepare_uv_script(CHAT_PROGRAM_SOURCE)

asyncio.run(prepare())'
fi
printf '%s' "$wanted" >"$venv/.installed"
