#!/usr/bin/env bash
# Create the venv for vLLM's server on a CPU (deploy/vllm/README.md); do nothing if it is up to date.
#
#   bash scripts/setup_vllm.sh                                # into .venv-vllm in this repository
#   AGENTRL_VLLM_VENV=/opt/vllm bash scripts/setup_vllm.sh
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
# shellcheck source=scripts/lib/engine_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/engine_venv.sh"
make_engine_venv vllm "2.5 GB"
