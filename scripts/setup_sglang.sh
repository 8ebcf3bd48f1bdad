#!/usr/bin/env bash
# Makes the venv in which the real SGLang server runs on a CPU (deploy/sglang/README.md); instant when it is there.
#
#   bash scripts/setup_sglang.sh                                # into .venv-sglang of this repository
#   AGENTRL_SGLANG_VENV=/opt/sglang bash scripts/setup_sglang.sh
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
# shellcheck source=scripts/lib/engine_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/engine_venv.sh"
make_engine_venv sglang "1.6 GB"
