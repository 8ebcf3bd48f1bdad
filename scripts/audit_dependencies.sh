#!/usr/bin/env bash
# Look up the tested versions of the dependencies (requirements/lock.txt) in the advisory database of PyPI.
#
#   bash scripts/audit_dependencies.sh
#
# Exit code: 0 without an advisory, and where the service cannot be reached, which is printed; 1 with one. An advisory
# that does not concern AgentRL is an exception in requirements/advisories.txt: its id, then the reason.
#
# PIP_AUDIT  the command (default: pip-audit, installed into a temporary venv if it is missing)
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
audit=${PIP_AUDIT:-$(command -v pip-audit || true)}
if [ -z "$audit" ]; then
  step python3 -m venv "$scratch/venv"
  if ! step "$scratch/venv/bin/pip" --quiet --disable-pip-version-check install "pip-audit>=2.9,<3"; then
    printf 'audit: pip-audit cannot be installed, so nothing was looked up\n' >&2
    exit 0
  fi
  audit="$scratch/venv/bin/pip-audit"
fi

ignored=()
while read -r id reason; do
  case "$id" in "" | "#"*) continue ;; esac
  printf 'audit: exception %s: %s\n' "$id" "$reason"
  ignored+=(--ignore-vuln "$id")
done < requirements/advisories.txt

code=0
"$audit" --requirement requirements/lock.txt --no-deps --disable-pip --progress-spinner off --timeout 30 \
  --format json "${ignored[@]}" > "$scratch/out" 2> "$scratch/err" || code=$?
python3 - "$scratch/out" "$code" <<'PY' || { [ $? -eq 3 ] && tail -n 3 "$scratch/err" >&2 && exit 0; exit 1; }
import json
import sys

try:
    packages = json.load(open(sys.argv[1], encoding="utf-8"))["dependencies"]
except (ValueError, KeyError):
    packages = []
known = [package for package in packages if "skip_reason" not in package]
if not known:
    print("audit: the advisory service answered for no package, so nothing was looked up", file=sys.stderr)
    sys.exit(3)
print(f"audit: {len(known)} packages were looked up, {len(packages) - len(known)} are unknown to the service")
found = [(package, each) for package in known for each in package["vulns"]]
for package, each in found:
    fixed = ", ".join(each["fix_versions"]) or "none"
    print(f"audit: {package['name']} {package['version']}: {each['id']}; fixed in: {fixed}")
sys.exit(1 if found else 0)
PY
