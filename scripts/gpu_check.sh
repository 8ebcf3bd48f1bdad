#!/usr/bin/env bash
# Check one GPU: the gpu tests, parity with SGLang, training steps, memory against `agentrl plan`, a publication with
# an update of the engine. Write a page of figures. The check takes at most ten minutes, installing not counted.
#
#   bash scripts/gpu_check.sh                      the page is output/gpu_check.md
#   bash scripts/gpu_check.sh --out PAGE.md --model models/Qwen3-0.6B
#   bash scripts/gpu_check.sh --only 8B MoE
#   bash scripts/gpu_check.sh --fake               without a GPU: fake CUDA tensors, and a tiny model on the CPU
#
# Further flags: scripts/bench/gpu_check.py --help. The exit code is 1 if a part failed; the page says why.
# AGENTRL_SGLANG_VENV  venv with SGLang (default: .venv-sglang, which this script makes if it is missing)
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

step bash scripts/setup.sh --dev
uses_sglang=1
for argument in "$@"; do
  case "$argument" in --fake | local | vllm) uses_sglang=0 ;; esac
done
# Without SGLang its part fails, and the page names the reason; the other parts run.
if [ "$uses_sglang" = 1 ] && [ ! -x "${AGENTRL_SGLANG_VENV:-.venv-sglang}/bin/python" ]; then
  step timeout 1800 bash scripts/setup_sglang.sh || echo "gpu_check: SGLang is not installed" >&2
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT=0
step "${AGENTRL_VENV:-.venv}/bin/python" scripts/bench/gpu_check.py "$@"
