#!/usr/bin/env bash
# Run the unit tests with the lowest versions of the direct requirements that requirements/ allows, once a release.
#
#   bash scripts/test_lower_bounds.sh [--resolve]      --resolve: print the versions, install and test nothing
#
# The venv is .venv-lowest, with uv in .venv-lowest/uv. Without a GPU it gets the CPU build of torch if its index can
# be reached: AGENTRL_TORCH_INDEX names another one. It takes 2 GB and about fifteen minutes.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

venv=.venv-lowest
uv=$venv/uv/bin/uv
[ -x "$uv" ] || {
  step "${PYTHON:-python3}" -m venv "$venv/uv"
  step "$venv/uv/bin/pip" --quiet --disable-pip-version-check install "uv>=0.9"
}
files=(requirements/base.txt requirements/dashboard.txt requirements/sampler.txt requirements/trainer.txt
  requirements/math.txt requirements/mongo.txt requirements/plots.txt requirements/dev.txt)
# Not --resolution lowest: others name no lower bounds, and get packages of 2005 that no longer build.
"$uv" pip compile --quiet --python-version 3.11 --resolution lowest-direct --no-header --no-annotate \
  "${files[@]}" --output-file "$venv/lowest.txt"
sed 's/^/test_lower_bounds: /' "$venv/lowest.txt"
[ "${1:-}" = "--resolve" ] && exit 0

index=${AGENTRL_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
[ -x "$venv/test/bin/python" ] || step "$uv" venv --quiet --python 3.11 "$venv/test"
torch=$(grep '^torch==' "$venv/lowest.txt")
step "$uv" pip install --quiet --python "$venv/test/bin/python" --index-url "$index" --no-deps "$torch" ||
  printf 'test_lower_bounds: %s cannot be reached: torch comes from the usual index\n' "$index" >&2
step "$uv" pip install --quiet --python "$venv/test/bin/python" --requirement "$venv/lowest.txt"
step "$uv" pip install --quiet --python "$venv/test/bin/python" --no-deps --editable .
exec env OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
  "$venv/test/bin/python" -m pytest -n 2 --dist worksteal tests/*/unit
