#!/usr/bin/env bash
# Open every page of the dashboard in headless Chromium on a run of 100,000 trajectories.
#
#   bash scripts/test_browser.sh                        # about ten minutes on two cores
#   bash scripts/test_browser.sh --trajectories 8000    # a smaller run
#   bash scripts/test_browser.sh --only rewards         # the pages whose name contains this
#
# Each page is opened in light and dark colours, on a desk and on a phone of 400 pixels. It checks the server's time
# for each page (a median below 300 ms), the console, what axe-core finds serious, that each chart
# shows something, that the page does not scroll sideways, and that text of a model stays text. It writes the
# screenshots of the docs to IMAGES.
# Chromium, axe-core and playwright are installed into .browser/ without root, from npm and PyPI.
#
# AGENTRL_CHROMIUM  Chromium or Chrome to use (default: one on the PATH, else the one of npm)
# PYTHON            Python of the environment with AgentRL (default: .venv/bin/python, else python3)
# IMAGES            folder of the screenshots (default: docs/images)
# LIMIT_MS          largest median server time of a page (default: 300)
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

trajectories=100000 only=""
while [ $# -gt 0 ]; do
  case "$1" in
    --trajectories) trajectories=${2:?}; shift 2 ;;
    --only) only=${2:?}; shift 2 ;;
    *) printf 'test_browser: unknown argument %s; choose --trajectories N or --only NAME\n' "$1" >&2; exit 2 ;;
  esac
done

python=${PYTHON:-}
if [ -z "$python" ]; then python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3); fi
folder=$PWD/.browser
tools="playwright==1.65.* pillow==13.*"
packages="@sparticuz/chromium@153 axe-core@4"
mkdir -p "$folder"

fail() { printf 'test_browser: %s\n' "$1" >&2; exit 1; }

# install NAME STAMP COMMAND …: run the command unless it succeeded before with the same versions.
install() {
  local name=$1 stamp=$2
  shift 2
  [ "$(cat "$folder/$name.stamp" 2>/dev/null)" = "$stamp" ] && return
  echo "test_browser: installs $stamp"
  "$@" >"$folder/$name.log" 2>&1 || fail "cannot install $stamp: $(tail -n 3 "$folder/$name.log"); is there a network?"
  echo "$stamp" >"$folder/$name.stamp"
}

install_tools() {
  "$python" -m venv "$folder/venv"
  # shellcheck disable=SC2086
  "$folder/venv/bin/pip" install -q $tools
}

command -v npm >/dev/null || fail "npm is missing: install Node.js 20 or newer; axe-core and Chromium come from npm"
echo '{"private": true, "type": "module"}' >"$folder/package.json"
install venv "$tools" install_tools
# shellcheck disable=SC2086
install npm "$packages" npm install --prefix "$folder" --no-audit --no-fund --loglevel error $packages

chromium=${AGENTRL_CHROMIUM:-}
for name in chromium chromium-browser google-chrome google-chrome-stable; do
  if [ -z "$chromium" ]; then chromium=$(command -v "$name" || true); fi
done
if [ -z "$chromium" ]; then
  mkdir -p "$folder/unpacked"
  chromium=$(cd "$folder" && TMPDIR=$folder/unpacked node -e \
    'import("@sparticuz/chromium").then(async ({default: it}) => console.log(await it.executablePath()))')
fi
"$chromium" --version --headless --no-sandbox >/dev/null 2>"$folder/chromium.log" \
  || fail "$chromium does not start: $(tail -n 3 "$folder/chromium.log"); name another one as AGENTRL_CHROMIUM"
echo "test_browser: $chromium"

step "$python" scripts/browser/serve_large_run.py --trajectories "$trajectories" -- \
  "$folder/venv/bin/python" scripts/browser/check_pages.py --chromium "$chromium" \
  --axe "$folder/node_modules/axe-core/axe.min.js" --images "${IMAGES:-docs/images}" --limit_ms "${LIMIT_MS:-300}" \
  --only "$only"
