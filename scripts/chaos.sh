#!/usr/bin/env bash
# Runs a whole system while its processes, its database, its network and its disk fail at random, then checks it.
#
#   bash scripts/chaos.sh                          ten minutes, seed 0
#   bash scripts/chaos.sh --minutes 3 --seed 7     another seed is another schedule of faults
#   bash scripts/chaos.sh --replica_set            three mongods, whose primary is killed again and again
#   bash scripts/chaos.sh --keep /tmp/fire         keep logs and data there
#
# The last line is `N violations`; the exit code is 0 where N is 0.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh
export PYTHONPATH="$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "${AGENTRL_VENV:-.venv}/bin/python" -m chaos "$@"
