#!/usr/bin/env bash
# Train a tiny model in every layout with gloo processes on this machine, and compare it with a single process:
# loss, gradient norm and weights of three steps, then of two more after resuming in another layout.
#
#   bash scripts/test_distributed.sh              every layout
#   bash scripts/test_distributed.sh fsdp2 tp2    some layouts
#   PRODUCTS=bfloat16 bash scripts/test_distributed.sh
#
# Prints one line per layout with its largest deviations. The limit is 1e-4; with PRODUCTS=bfloat16, for layouts
# that compute in bfloat16 over float32 weights, it is what rounding explains. The exit code is 0 if all are ok. A
# layout that raises an error also ends the other layouts with the same number of processes. The test shows that
# the layouts are correct; it does not measure their speed.
set -uo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh --dev

python="${AGENTRL_VENV:-.venv}/bin/python"
program=tests/core/integration/distributed/layouts.py
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT=0 HF_HUB_OFFLINE=1
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

failed=0
while read -r -a line; do
  processes="${line[0]}"
  # Layouts with the same number of processes share one launch, because imports take most of the time.
  if ! step timeout 900 "$python" -m torch.distributed.run --standalone --nproc_per_node "$processes" \
    "$program" "${line[@]:1}" --products "${PRODUCTS:-float32}" --folder "$folder" 2>"$folder/log"; then
    failed=1
    grep -v '^W' "$folder/log" | head -40 >&2
  fi
done < <("$python" "$program" --list "$@")
exit "$failed"
