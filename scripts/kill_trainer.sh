#!/usr/bin/env bash
# Kills the trainer again and again, and shows that it trains what it would have trained in peace.
#
#   bash scripts/kill_trainer.sh                        ten kills over twenty steps (about four minutes)
#   bash scripts/kill_trainer.sh --kills 3 --steps 6 --seed 5
#
# Prints both loss and reward curves, and `identical` where steps, data, losses, rewards and weights are.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh
export PYTHONPATH="$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "${AGENTRL_VENV:-.venv}/bin/python" -m chaos.trainer_kills "$@"
