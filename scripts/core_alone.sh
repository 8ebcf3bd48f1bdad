#!/usr/bin/env bash
# The core without its wings: in a copy from which lab, local, worlds and screens are deleted, import every module, run
# two steps on a MongoDB that is given and an engine that answers by a script, and then the core's unit tests.
#
#   bash scripts/core_alone.sh                      (needs .venv: bash scripts/setup.sh --dev)
#   bash scripts/core_alone.sh tests/core/unit/data   other tests than all of tests/core/unit
#
# AGENTRL_TEST_MONGODB names the server; by default this starts one, by the clone's own `agentrl mongo up`.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

python="$(cd "${AGENTRL_VENV:-.venv}/bin" && pwd)/python"
scratch="$(mktemp -d)"
stop() {
  [ ! -d "$scratch/mongo" ] || PYTHONPATH='' "$python" -m agentrl mongo down --mongo_dir "$scratch/mongo" || true
  rm -rf "$scratch"
}
trap stop EXIT

if [ -z "${AGENTRL_TEST_MONGODB:-}" ]; then
  "$python" -m agentrl mongo up --mongo_dir "$scratch/mongo"
  AGENTRL_TEST_MONGODB="$("$python" -m agentrl mongo uri --mongo_dir "$scratch/mongo")"
fi
export AGENTRL_TEST_MONGODB

copy="$scratch/agentrl"
mkdir "$copy"
git ls-files -z --cached --others --exclude-standard | xargs -0 tar -cf - | tar -xf - -C "$copy"
cd "$copy"
rm -rf src/agentrl/{lab,local,worlds,screens} tests/{house,lab,local,worlds,screens,acceptance,chaos,unmoved}
export PYTHONPATH="$copy/src"

step "$python" - <<'EOF'
import importlib, pathlib
sources = pathlib.Path("src")
names = [
    ".".join(path.relative_to(sources).with_suffix("").parts).removesuffix(".__init__")
    for path in sources.rglob("*.py")
    if path.stem != "__main__"
]
for name in names:
    importlib.import_module(name)
print(f"{len(names)} modules of the core import, without a wing")
EOF
step "$python" -m pytest tests/core/integration/test_two_steps.py
step "$python" -m pytest -n 2 --dist worksteal "${@:-tests/core/unit}"
