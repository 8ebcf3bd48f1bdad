#!/usr/bin/env bash
# Run all checks of a change: lint, types, import contracts, unit, integration and acceptance tests.
#
#   bash scripts/test.sh            all checks (about half an hour on 2 cores)
#   bash scripts/test.sh --fast     lint, types and unit tests (about 4 minutes)
#   bash scripts/test.sh -k claims  pass arguments to pytest
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh --dev

bin="${AGENTRL_VENV:-.venv}/bin"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

if [ "${1:-}" = "--fast" ]; then
  shift
  set -- tests/unit "$@"
elif [ $# -eq 0 ]; then
  step bash scripts/setup_sglang.sh
  export AGENTRL_REQUIRE_ENGINES=sglang
  step bash scripts/setup_harnesses.sh mini-swe-agent openai-agents
  export AGENTRL_REQUIRE_HARNESSES=mini-swe-agent,openai-agents
  code=0
  step bash scripts/setup_harnesses.sh claude-code || code=$?
  case $code in
    0) AGENTRL_REQUIRE_HARNESSES+=,claude-code ;;
    4) echo "test: goes on without npm; the tests of its harnesses are skipped" >&2 ;;
    *) exit "$code" ;;
  esac
fi

step "$bin/ruff" check .
step "$bin/ruff" format --check .
step "$bin/mypy"
step "$bin/lint-imports" --no-logo
exec "$bin/python" -m pytest "$@"
