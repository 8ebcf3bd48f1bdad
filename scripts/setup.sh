#!/usr/bin/env bash
# Create .venv and install AgentRL with its requirements; do nothing if it is up to date.
#
#   bash scripts/setup.sh [--dev]
#
# PYTHON               Python interpreter, 3.11 or newer (default: the newest one found)
# AGENTRL_VENV         folder of the virtual environment (default: .venv)
# AGENTRL_TORCH_INDEX  package index of torch (default: the CPU index if there is no GPU and it can be reached)
# AGENTRL_INSTALLER    uv or pip (default: uv, of the PATH or else from PyPI; pip where uv cannot install)
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
. "$(dirname "$0")/lib/install.sh"
cd "$(dirname "$0")/.."

venv=${AGENTRL_VENV:-.venv}
extras=""
[ "${1:-}" = "--dev" ] && extras="dev"

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found; install one, or set its path: PYTHON=/path/to/python3.11 bash scripts/setup.sh"
}

fingerprint() {
  { cat pyproject.toml requirements.txt requirements/*.txt; pwd; "$venv/bin/python" -V 2>&1; } | sha256sum | cut -c1-64
}

# There is a stamp for each set of extras; the dev set includes the plain one.
installed() {
  [ -x "$venv/bin/python" ] || return 1
  local now stamp
  now=$(fingerprint)
  for stamp in "$venv/.agentrl-$extras" "$venv/.agentrl-dev"; do
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ] && return 0
  done
  return 1
}

# Print the clone that the environment belongs to, if it is another one that still exists.
other_clone() {
  [ -x "$venv/bin/python" ] || return 0
  "$venv/bin/python" - <<'PY' 2>/dev/null || true
import json, pathlib, urllib.parse
from importlib.metadata import distributions
for found in distributions(name="agentrl-mongo"):
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        clone = pathlib.Path(urllib.parse.unquote(urllib.parse.urlsplit(origin["url"]).path))
        if clone.is_dir() and clone.resolve() != pathlib.Path.cwd().resolve():
            print(clone)
            break
PY
}

torch_index() {
  [ -n "${AGENTRL_TORCH_INDEX:-}" ] && { printf '%s' "$AGENTRL_TORCH_INDEX"; return; }
  command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1 && return
  local cpu=https://download.pytorch.org/whl/cpu
  "$venv/bin/python" - "$cpu/torch/" <<'PY' 2>/dev/null && printf '%s' "$cpu"
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=5)
PY
  return 0
}

if installed; then exit 0; fi
other=$(other_clone)
[ -z "$other" ] || fail "$venv runs the clone in $other, and would run this one everywhere: set AGENTRL_VENV to a folder of this clone's own, or unset it"

# Only one installer runs at a time; a second one waits here and then finds the stamp.
mkdir -p "$venv"
if command -v flock >/dev/null; then
  exec 9>"$venv/.install.lock"
  flock --wait 900 9 || fail "another installation has locked $venv/.install.lock for 15 minutes"
  if installed; then exit 0; fi
fi

python=$(find_python)
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "cannot create $venv: install the venv module (Debian: apt install python3-venv)"
# Show pip's lines as one changing line on a terminal; elsewhere a line every 10 s, and one per large download.
show_pip() {
  local line what="starting pip" began=$SECONDS shown=$SECONDS found=0 code
  while :; do
    code=0
    IFS= read -r -t 1 line || code=$?
    if [ "$code" -eq 0 ]; then
      case "$line" in
        *Downloading\ *MB*\)) what=${line##*Downloading }; what="downloading ${what##*/}" ;;
        Collecting\ *) found=$((found + 1)); what="packages found: $found" ;;
        Installing\ collected*) what="packages to install: $(($(tr -cd , <<< "$line" | wc -c) + 1))" ;;
        *) continue ;;
      esac
    elif [ "$code" -le 128 ]; then # the end of the input; above 128 a second has passed without a line
      break
    fi
    if [ -t 1 ]; then
      printf '\r\033[Ksetup: %s (%d s)' "$what" $((SECONDS - began))
    elif [ $((SECONDS - shown)) -ge 10 ] || [[ "$code" -eq 0 && "$what" == downloading*[0-9][0-9].*MB* ]]; then
      printf 'setup: %s (%d s)\n' "$what" $((SECONDS - began))
      shown=$SECONDS
    fi
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

pip() {
  local code=0 shower
  exec 8> >(show_pip)
  shower=$!
  step env PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip "$@" --progress-bar off \
    >&8 2> >(grep -v '^WARNING: Location' >&2) || code=$?
  exec 8>&-
  wait "$shower" || true
  return "$code"
}

# By uv, or by pip. Tests import most of what is installed, so that all of it is compiled for them.
compile=--no-compile
[ -z "$extras" ] || compile=--compile
install() {
  local quiet=--quiet
  [ ! -t 2 ] || quiet=
  uv_install "$venv" $quiet $compile --reinstall-package agentrl-mongo "$@" || pip install $compile "$@"
}

printf 'setup: installing into %s (a few minutes, once)\n' "$venv"
torch=$(grep '^torch==' requirements/lock.txt)
index=$(torch_index)
if [ -n "$index" ] && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  printf 'setup: %s\n' "$torch"
  install --index-url "$index" "$torch" || fail "cannot install $torch; set AGENTRL_TORCH_INDEX to a package index that you can reach"
fi
printf 'setup: requirements\n'
install -r requirements.txt ${extras:+-r requirements/dev.txt} -c requirements/lock.txt -e . || fail "cannot install requirements.txt"
if [ -n "$extras" ]; then
  install -r requirements/environments.txt -c requirements/lock.txt ||
    printf 'setup: reasoning-gym and textarena are not installed, so their tests skip; building pycosat needs a C compiler\n' >&2
else
  # Compile what a run imports, a quarter of all, also where PYTHONDONTWRITEBYTECODE would leave it to each process.
  step env -u PYTHONDONTWRITEBYTECODE bash -c '"$0" -c "$1" & "$0" -c "$2" && wait $!' "$venv/bin/python" \
    'import agentrl.train.start, agentrl.local.engine.server, accelerate, peft' \
    'import agentrl.local.quickstart, agentrl.rollout.setup, agentrl.screens.dashboard.serve, matplotlib.figure, uvicorn' ||
    fail "what is installed in $venv cannot be imported"
fi
fingerprint > "$venv/.agentrl-$extras"
printf 'setup: done; activate with: . %q\n' "$venv/bin/activate"
