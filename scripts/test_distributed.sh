#!/usr/bin/env bash
# Trains a tiny model in every layout on gloo processes of this machine, and compares it with one process:
# loss, gradient norm and weights of three steps, then two more from a checkpoint resumed in another layout.
#
#   bash scripts/test_distributed.sh              every layout
#   bash scripts/test_distributed.sh fsdp2 tp2    some of them
#
# One line for each: the largest deviations (the limit is 1e-4). The exit code is 0 where all are ok. A layout
# that raises ends those of equally many processes.
# It shows that the layouts are right; processes that share a few CPU cores say nothing of their speed.
set -uo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh --dev

python="${AGENTRL_VENV:-.venv}/bin/python"
program=tests/integration/distributed/layouts.py
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT=0 HF_HUB_OFFLINE=1
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

failed=0
while read -r -a line; do
  processes="${line[0]}"
  # Layouts of equally many processes share one launch, for most of the time is imports.
  if ! step timeout 900 "$python" -m torch.distributed.run --standalone --nproc_per_node "$processes" \
    "$program" "${line[@]:1}" --folder "$folder" 2>"$folder/log"; then
    failed=1
    grep -v '^W' "$folder/log" | head -40 >&2
  fi
done < <("$python" "$program" --list "$@")
exit "$failed"
