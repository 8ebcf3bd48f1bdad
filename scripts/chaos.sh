#!/usr/bin/env bash
# Run a whole system while its processes, database, network and disk fail at random, then check its data.
#
#   bash scripts/chaos.sh                          ten minutes, seed 0
#   bash scripts/chaos.sh --minutes 3 --seed 7     another schedule of faults
#   bash scripts/chaos.sh --replica_set            three mongods; the primary is killed often
#   bash scripts/chaos.sh --drills 60              instead: engine, tool server, judge, database down, 60 s each
#   bash scripts/chaos.sh --refusals 60            instead: a dead manager, and a judge that refuses 480 slots
#   bash scripts/chaos.sh --harness 60             instead: kill gateway, harnesses, samplers, mongod under 16 harnesses
#   bash scripts/chaos.sh --containers 60          instead: kill samplers and mongod under 16 trajectories in containers
#   bash scripts/chaos.sh --weights 240            instead: kill trainer and engines, take their bucket away for 60 s
#   bash scripts/chaos.sh --keep /tmp/chaos        keep logs and data in this folder
#
# The last line is `N violations`; the exit code is 0 if N is 0.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh
export PYTHONPATH="$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "${AGENTRL_VENV:-.venv}/bin/python" -m chaos "$@"
