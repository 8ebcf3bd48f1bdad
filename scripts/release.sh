#!/usr/bin/env bash
# Build the sdist and the wheel, check them, and run the wheel's quickstart in an empty venv outside the repository.
#
#   bash scripts/release.sh                      # installs every requirement from the package index: gigabytes
#   bash scripts/release.sh --borrow .venv       # takes the requirements from a venv that has them
#   bash scripts/release.sh --borrow .venv --steps 2
#
# The version is that of the git tag: `git tag v0.1.0` first. Nothing is uploaded; the last line says how.
#
# DIST    where the files are written (default: dist)
# PYTHON  Python interpreter of the empty venv (default: python3)
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

borrow="" steps=2
while [ $# -gt 0 ]; do
  case "$1" in
    --borrow) borrow=$(cd "$2" && pwd); shift 2 ;;
    --steps) steps=$2; shift 2 ;;
    *) printf 'release: unknown argument %s; choose --borrow VENV or --steps N\n' "$1" >&2; exit 2 ;;
  esac
done

dist=${DIST:-dist}
mkdir -p "$dist"
dist=$(cd "$dist" && pwd)
rm -f "$dist"/agentrl_mongo-*.whl "$dist"/agentrl_mongo-*.tar.gz
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python=${PYTHON:-python3}

printf 'release: building in %s\n' "$dist"
step "$python" -m venv "$scratch/build"
step "$scratch/build/bin/pip" --quiet --disable-pip-version-check install "build>=1.3,<2" "twine>=6,<7"
step "$scratch/build/bin/python" -m build --outdir "$dist" .
step "$scratch/build/bin/twine" check --strict "$dist"/agentrl_mongo-*

printf 'release: installing the wheel into an empty venv\n'
step "$python" -m venv "$scratch/empty"
if [ -n "$borrow" ]; then
  "$borrow/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$scratch/empty/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
  step "$scratch/empty/bin/pip" --quiet --disable-pip-version-check install --no-deps "$dist"/agentrl_mongo-*.whl
else
  step "$scratch/empty/bin/pip" --quiet --disable-pip-version-check install "$(ls "$dist"/agentrl_mongo-*.whl)[quickstart]"
fi

mkdir "$scratch/elsewhere"
cd "$scratch/elsewhere"
case "$("$scratch/empty/bin/python" -c 'import agentrl; print(agentrl.__file__)')" in
  "$scratch/empty"/*) ;;
  *) printf 'release: the empty venv imports another agentrl than the wheel\n' >&2; exit 1 ;;
esac
printf 'release: agentrl quickstart --tiny --steps %s, of %s\n' "$steps" "$("$scratch/empty/bin/agentrl" --version)"
step "$scratch/empty/bin/agentrl" quickstart --tiny --steps "$steps"
printf 'release: done. To publish: twine upload %q/agentrl_mongo-*\n' "$dist"
