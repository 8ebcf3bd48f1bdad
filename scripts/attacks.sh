#!/usr/bin/env bash
# Run the tests that try what an attacker or a broken machine would, and name each with its outcome: tricks that pass a
# harness's hidden tests, requests that hold a gateway, half-open connections, a dashboard without its token, exports that
# name code, folders and containers of killed processes, changed documents, numbers and texts that nothing can hold,
# git bundles that unpack to any size, clocks that differ by ten minutes, a disk that fills, caches without a bound.
#
#   bash scripts/attacks.sh             five minutes on two cores
#   bash scripts/attacks.sh -k harness  pass arguments to pytest
#
# The exit code is 0 if all attacks fail. Tests that need something this machine lacks are skipped with the reason.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh --dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT=0 HF_HUB_OFFLINE=1
exec "${AGENTRL_VENV:-.venv}/bin/python" -m pytest -m attack --verbosity 1 "$@"
