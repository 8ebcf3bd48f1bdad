#!/usr/bin/env bash
# Trains a tiny model in every layout on gloo processes of this machine, and compares it with one process:
# loss, gradient norm and weights of three steps, then two more from a checkpoint resumed in another layout.
#
#   bash scripts/test_distributed.sh              every layout
#   bash scripts/test_distributed.sh fsdp2 tp2    some of them
#
# One line for each: the largest deviations (the limit is 1e-4). The exit code is 0 where all are ok.
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

[ $# -gt 0 ] || mapfile -t known < <("$python" "$program" --list)
[ $# -gt 0 ] && mapfile -t known < <("$python" "$program" --list "$@")
failed=0
for line in "${known[@]}"; do
  read -r processes layout <<<"$line"
  mkdir "$folder/$layout"
  if ! step timeout 240 "$python" -m torch.distributed.run --standalone --nproc_per_node "$processes" \
    "$program" "$layout" --folder "$folder/$layout" 2>"$folder/$layout/log"; then
    failed=1
    echo "$layout: FAILED"
    grep -v '^W' "$folder/$layout/log" | head -40 >&2
  fi
done
exit "$failed"
