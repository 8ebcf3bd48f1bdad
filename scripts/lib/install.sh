# Sourced by the scripts that install Python packages. uv needs a fraction of pip's CPU time.
#
# AGENTRL_INSTALLER  uv or pip (default: uv, from the PATH, .venv or PyPI; pip where uv cannot install)

installers=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# uv_install VENV ARGUMENT …: `uv pip install` into VENV, with pip's settings; fails if pip should install instead.
uv_install() {
  local venv=$1 uv
  shift
  [ "${AGENTRL_INSTALLER:-uv}" = uv ] || return 1
  for uv in "$(command -v uv)" "$(venv_of "$installers/../..")/bin/uv" "$venv/bin/uv"; do
    [ ! -x "$uv" ] || break
  done
  if { [ -x "$uv" ] || step "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "uv>=0.9,<1" \
    2> >(grep -v '^WARNING: Location' >&2); } && step "$venv/bin/python" "$installers/uv_install.py" "$uv" "$@"; then
    return
  fi
  printf '%s: uv cannot install into %s; pip does\n' "${0##*/}" "$venv" >&2
  return 1
}

# install_into VENV ARGUMENT …: `pip install` into VENV, by uv or by pip.
install_into() {
  local venv=$1
  uv_install "$venv" --quiet --compile "${@:2}" ||
    step "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}" 2> >(grep -v '^WARNING: Location' >&2)
}
