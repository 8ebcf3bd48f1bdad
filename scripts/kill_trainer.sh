#!/usr/bin/env bash
# Kill the trainer repeatedly, and compare the result with an undisturbed run.
#
#   bash scripts/kill_trainer.sh                        ten kills over twenty steps (about four minutes)
#   bash scripts/kill_trainer.sh --kills 3 --steps 6 --seed 5
#
# Prints the losses and rewards of both runs, and `identical` if steps, data, losses, rewards and weights are.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh
export PYTHONPATH="$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "${AGENTRL_VENV:-.venv}/bin/python" -m chaos.trainer_kills "$@"
