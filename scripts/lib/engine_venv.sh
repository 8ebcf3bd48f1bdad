# Sourced by setup_sglang.sh and setup_vllm.sh: create the venv of an engine with the versions pinned in deploy/.
# With an NVIDIA GPU, an engine that has a requirements-gpu.txt gets those.

# shellcheck source=scripts/lib/install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

# make_engine_venv NAME SIZE: install the requirements of deploy/NAME into AGENTRL_NAME_VENV or .venv-NAME.
make_engine_venv() {
    local name=$1 size=$2
    local variable="AGENTRL_${name^^}_VENV"
    local venv="${!variable:-$root/.venv-$name}"
    local requirements="$root/deploy/$name/requirements-cpu.txt"
    local nodeps="$root/deploy/$name/requirements-cpu-nodeps.txt"
    local stamp="$venv/.requirements.sha256" wanted
    if [[ -f "$root/deploy/$name/requirements-gpu.txt" ]] && nvidia-smi >/dev/null 2>&1; then
        requirements="$root/deploy/$name/requirements-gpu.txt" nodeps=/dev/null size="20 GB"
    fi
    wanted="$(cat "$requirements" "$nodeps" | sha256sum | cut -d' ' -f1)"

    up_to_date() { [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; }
    if up_to_date; then
        echo "$name venv: $venv (up to date)"
        return
    fi

    # Only one installer runs at a time; a second one waits here and then finds the stamp.
    mkdir -p "$venv"
    exec 9>"$venv/.install.lock"
    if ! flock --wait 900 9; then
        echo "setup_$name: another installation has locked $venv/.install.lock for 15 minutes" >&2
        return 1
    fi
    if up_to_date; then
        echo "$name venv: $venv (up to date)"
        return
    fi

    echo "$name venv: installing into $venv (about $size, one to three minutes)"
    rm -f "$stamp"
    step "${PYTHON:-python3}" -m venv "$venv"
    if [[ "$nodeps" == /dev/null ]]; then
        step "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$requirements"
    else
        # Compile what an engine imports when it first starts: that is a third of all.
        install_into "$venv" --no-compile --requirement "$requirements"
        install_into "$venv" --no-compile --no-deps --requirement "$nodeps"
    fi
    printf '%s\n' "$wanted" >"$stamp"
    echo "$name venv: $venv (installed)"
}
