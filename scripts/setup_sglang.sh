#!/usr/bin/env bash
# Create the venv for SGLang's server, for a CPU or for NVIDIA GPUs (deploy/sglang/README.md); do nothing if it is up
# to date.
#
#   bash scripts/setup_sglang.sh                                # into .venv-sglang in this repository
#   AGENTRL_SGLANG_VENV=/opt/sglang bash scripts/setup_sglang.sh
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
# shellcheck source=scripts/lib/engine_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/engine_venv.sh"
make_engine_venv sglang "1.6 GB"
