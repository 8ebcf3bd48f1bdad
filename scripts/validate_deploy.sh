#!/usr/bin/env bash
# Check deploy/ with the tools of its targets, without Docker or a cluster; print what ran and what did not.
#
#   bash scripts/validate_deploy.sh
#
# AGENTRL_DEPLOY_VENV  venv of the tools (default: .venv-deploy; installed from PyPI on the first run, about 250 MB)
# PYTHON               Python interpreter, 3.11 or newer (default: python3)
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."

venv=${AGENTRL_DEPLOY_VENV:-.venv-deploy}
bin="$venv/bin"
wanted=$(sha256sum < deploy/validate-requirements.txt)
if [ "$(cat "$venv/.requirements" 2>/dev/null)" != "$wanted" ]; then
  printf 'validate_deploy: installing the tools into %s\n' "$venv"
  step "${PYTHON:-python3}" -m venv "$venv"
  step "$bin/python" -m pip install --quiet --disable-pip-version-check --requirement deploy/validate-requirements.txt
  printf '%s\n' "$wanted" > "$venv/.requirements"
fi

failed=0
# check WHAT COMMAND…: run a check, quietly if it passes.
check() {
  local what=$1 said
  shift
  if said=$("$@" 2>&1); then
    printf 'passed   %s\n' "$what"
  else
    failed=1
    printf 'FAILED   %s\n%s\n' "$what" "$said"
  fi
}

# The packaged docker compose exits with 0 after an error: a resolved model begins with its name.
compose() {
  local model
  model=$("$bin/docker-compose" --profile commands "$@" config 2>&1)
  if [ "${model%%:*}" != name ]; then printf '%s\n' "$model"; return 1; fi
}
with_model() { MODEL_DIR=/models/policy compose "$@"; }
is_refused() { if compose "$@"; then echo 'it is accepted'; return 1; fi; }
mapfile -t shell < <(find deploy scripts/validate_deploy.sh -name '*.sh' -o -name '*.sbatch' | sort)
mapfile -t yaml < <(find deploy -name '*.yml' -o -name '*.yaml' | grep -v '^deploy/helm/agentrl/templates/' | sort)

check 'Dockerfiles: hadolint' "$bin/hadolint" deploy/docker/*.Dockerfile
check 'compose.yml: docker compose config' with_model --file deploy/compose.yml
check 'compose.yml and compose.cpu.yml: docker compose config' with_model --file deploy/compose.yml --file deploy/compose.cpu.yml
check 'mongo/docker-compose.yml: docker compose config' compose --file deploy/mongo/docker-compose.yml
check 'sglang/docker-compose.yml: docker compose config' with_model --file deploy/sglang/docker-compose.yml
check 'compose.yml without MODEL_DIR is refused' is_refused --file deploy/compose.yml
check "shell scripts (${#shell[@]}): shellcheck" "$bin/shellcheck" --severity=warning --shell=bash "${shell[@]}"
check "YAML files (${#yaml[@]}): yamllint" "$bin/yamllint" --strict --config-file deploy/yamllint.yml "${yaml[@]}"
if [ -f deploy/helm/validate.py ]; then
  check 'values.schema.json: JSON Schema' "$bin/check-jsonschema" --check-metaschema deploy/helm/agentrl/values.schema.json
  check 'Helm chart: helm lint, template and the schemas of Kubernetes 1.33' "$bin/python" deploy/helm/validate.py
fi

printf 'not run  docker build, docker compose up: they need a Docker daemon and a registry\n'
printf 'not run  helm install, KEDA, Kubeflow: they need a cluster\n'
printf 'not run  sbatch, sky launch: they need a cluster or a cloud account\n'
exit $failed
