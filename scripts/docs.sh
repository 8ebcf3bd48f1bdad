#!/usr/bin/env bash
# Build the documentation site into site/, for a server or to open site/index.html. A broken link or anchor, or any other
# warning, is an error.
#
#   bash scripts/docs.sh [--serve]   --serve shows it at http://127.0.0.1:8000 and rebuilds after every change
#
# PYTHON  Python interpreter, 3.11 or newer (default: python3)
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
. "$(dirname "$0")/lib/install.sh"
cd "$(dirname "$0")/.."

venv=.venv-docs
if ! cmp --quiet requirements/docs.txt "$venv/installed.txt"; then
  "${PYTHON:-python3}" -m venv "$venv"
  install_into "$venv" -r requirements/docs.txt
  cp requirements/docs.txt "$venv/installed.txt"
fi

export NO_MKDOCS_2_WARNING=1
if [ "${1:-}" = --serve ]; then
  step "$venv/bin/mkdocs" serve --dev-addr 127.0.0.1:8000
else
  step "$venv/bin/mkdocs" build --strict
  if grep -rEl --include='*.html' '<(script|link|img|iframe)[^>]+(src|href)="?(https?:)?//' site; then
    printf 'docs: these pages fetch something from another host\n' >&2
    exit 1
  fi
  pages=$(find site -name '*.html' | wc -l)
  printf 'docs: %s pages in site/; to read and search, open site/index.html in a browser\n' "$pages"
fi
