#!/usr/bin/env bash
# Run all checks of a change: lint, types, import contracts, unit, integration and acceptance tests.
#
#   bash scripts/test.sh            all checks (about 40 minutes on 2 cores)
#   bash scripts/test.sh --fast     lint, types and unit tests (about 3 minutes)
#   bash scripts/test.sh lab        lint, types and all tests of one room: core, house, lab, local, worlds or screens
#   bash scripts/test.sh -k claims  pass arguments to pytest
#
# Without arguments, pytest runs three times: the core's unit tests and its run of two steps, where there is no wing
# (core_alone.sh); what computes or has a database to itself ($apart); all other tests, which start processes and wait
# for them, three files at once.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

apart=(tests/{house,lab,local,worlds,screens}/unit tests/exactness tests/fake_gpu tests/unmoved
  tests/*/integration/store tests/screens/integration/dashboard tests/core/integration/test_bench_quick.py)

# What the second run needs outside .venv, and the site: done until it begins. Exit status 4: no npm.
install_others() {
  bash scripts/setup_sglang.sh || return 1
  bash scripts/setup_harnesses.sh mini-swe-agent openai-agents || return 1
  bash scripts/setup_openenv.sh || return 1
  bash scripts/setup_transformers4.sh || return 1
  bash scripts/setup_verifiers.sh || return 1
  bash scripts/docs.sh || return 1
  bash scripts/setup_harnesses.sh claude-code
}

if [ $# -eq 0 ]; then
  set -m
  install_others &
  others=$!
  set +m
  trap 'kill -TERM -- "-$others" 2>/dev/null || true' EXIT
fi
step bash scripts/setup.sh --dev

bin="${AGENTRL_VENV:-.venv}/bin"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # each process would compile the sources, and pytest rewrite all tests

step "$bin/ruff" check .
step "$bin/ruff" format --check .
step "$bin/mypy" -n 2
step "$bin/lint-imports" --no-logo

if [ "${1:-}" = "--fast" ]; then
  shift
  exec "$bin/python" -m pytest -n 2 --dist worksteal tests/*/unit "$@"
elif [ $# -eq 1 ] && [ -d "tests/$1/unit" ]; then
  exec "$bin/python" -m pytest -n 2 --dist loadfile "tests/$1"
elif [ $# -gt 0 ]; then
  exec "$bin/python" -m pytest "$@"
fi

step bash scripts/audit_dependencies.sh
failed=0
step bash scripts/core_alone.sh || failed=1
step "$bin/python" -m pytest -n 2 --dist worksteal "${apart[@]}" || failed=1

code=0
wait "$others" || code=$?
trap - EXIT
export AGENTRL_REQUIRE_ENGINES=sglang AGENTRL_REQUIRE_HARNESSES=mini-swe-agent,openai-agents
export AGENTRL_REQUIRE_TRANSFORMERS4=yes
case $code in
  0) AGENTRL_REQUIRE_HARNESSES+=,claude-code ;;
  4) echo "test: goes on without npm; the tests of its harnesses are skipped" >&2 ;;
  *) exit "$code" ;;
esac

rest=("$bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore=tests/core/unit
  --ignore=tests/core/integration/test_two_steps.py "${apart[@]/#/--ignore=}")
[ "$failed" = 1 ] || exec "${rest[@]}"
step "${rest[@]}" || true
echo "test: tests failed before the last run, in core_alone.sh or in ${apart[*]}: see the summaries above" >&2
exit 1
