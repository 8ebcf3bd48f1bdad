#!/usr/bin/env bash
# Run the engine contract against local, SGLang (also behind sglang-router) and vLLM; set up what is missing.
#
#   bash scripts/test_engines.sh              all engines
#   bash scripts/test_engines.sh sglang       one engine: local, sglang or vllm
#
# The venvs are .venv-sglang and .venv-vllm, or AGENTRL_SGLANG_VENV and AGENTRL_VLLM_VENV.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

engines=("$@")
[ $# -gt 0 ] || engines=(local sglang vllm)
bin="${AGENTRL_VENV:-.venv}/bin"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

for engine in "${engines[@]}"; do
  case "$engine" in
    local) ;;
    sglang | vllm) step bash "scripts/setup_$engine.sh" ;;
    *) echo "unknown engine '$engine'; choose from: local, sglang, vllm" >&2 && exit 2 ;;
  esac
done

AGENTRL_REQUIRE_ENGINES="$(IFS=,; echo "${engines[*]}")"
export AGENTRL_REQUIRE_ENGINES
for engine in "${engines[@]}"; do
  step "$bin/python" -m pytest tests/core/integration/test_engine_contract.py -q -k "$engine"
  [ "$engine" != local ] || step "$bin/python" -m pytest tests/core/integration/test_misbehaving_engines.py \
    tests/core/integration/test_engine_bounds.py -q
done
