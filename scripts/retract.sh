#!/usr/bin/env bash
# Withdraw trajectories of one step under SIGKILLs, and compare the run with one that never held them.
#
#   bash scripts/retract.sh                             five of step 7 of 10, ten kills (about two minutes)
#   bash scripts/retract.sh --steps 20 --at 11 --seed 3
#
# Prints the weights' digests of both runs, where the withdrawn ids are still found, and `identical` if steps,
# data, losses and weights are.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh
export PYTHONPATH="$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "${AGENTRL_VENV:-.venv}/bin/python" -m chaos.retraction "$@"
