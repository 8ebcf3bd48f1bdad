# Sourced by every script with its arguments: -h and --help print the header of the script and exit.

script_header() { sed -n '2,/^[^#]/{/^#/!q;s/^# \{0,1\}//;p}' "$1"; }

for argument in "$@"; do
  case "$argument" in
    -h | --help)
      script_header "$0"
      if [ -n "${variables:-}" ]; then printf "\n%s\n" "$variables"; fi
      exit 0
      ;;
  esac
done
unset argument

# step COMMAND …: run a command in a process group of its own; SIGINT and SIGTERM end the group and this script.
step() {
  local pid code=0
  set -m
  "$@" &
  pid=$!
  set +m
  trap 'kill -TERM -- "-$pid" 2>/dev/null; wait "$pid"; exit 130' INT
  trap 'kill -TERM -- "-$pid" 2>/dev/null; wait "$pid"; exit 143' TERM
  wait "$pid" || code=$?
  trap - INT TERM
  return "$code"
}

# venv_of ROOT: print the folder of the virtual environment of the clone ROOT, to which a relative AGENTRL_VENV belongs.
venv_of() {
  case "${AGENTRL_VENV:-.venv}" in
    /*) printf '%s' "$AGENTRL_VENV" ;;
    *) printf '%s/%s' "$1" "${AGENTRL_VENV:-.venv}" ;;
  esac
}
