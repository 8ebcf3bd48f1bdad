#!/usr/bin/env bash
# Execute the losses of verl, TRL, AReaL, slime, prime-rl, SkyRL and NeMo-RL on the step of the golden values, and compare
# them with the recipes of their names (docs/losses.md).
#
#   bash scripts/peers/compare.sh               all of them (needs .venv; about two minutes and 0.1 GB)
#   bash scripts/peers/compare.sh verl trl      these
#
# PEERS_URL  where OWNER/NAME is fetched from (default: https://github.com)
#
# Each system's source is fetched at the commit that its recipes name, into .agentrl/peers. What it imports is in
# .venv-peers; torch is that of .venv.
set -euo pipefail
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/install.sh"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
own="$(venv_of "$root")"
venv="$root/.venv-peers"
sources="$root/.agentrl/peers"
systems=("$@")
[ $# -gt 0 ] || systems=(verl trl areal slime prime_rl skyrl nemo_rl)

packages=(omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 tensordict==0.15.3 pyvers==0.2.3 beartype==0.23.1
  jaxtyping==0.3.11 wadler-lindig==0.1.8)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "${packages[*]}" ]; then
  step "${PYTHON:-python3}" -m venv "$venv"
  install_into "$venv" --no-deps "${packages[@]}"
  folder="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  printf '%s\n' "${folder/#"$venv"/"$own"}" >"$folder/shared.pth"
  printf '%s' "${packages[*]}" >"$venv/.installed"
fi

# fetch SYSTEM OWNER/NAME COMMIT FOLDER …: these folders of the repository at the commit, into $sources/SYSTEM.
fetch() {
  local folder="$sources/$1" url="${PEERS_URL:-https://github.com}/$2" commit=$3
  [ "$(git -C "$folder" rev-parse --verify --quiet HEAD 2>/dev/null)" != "$commit" ] || return 0
  rm -rf "$folder"
  git init --quiet "$folder"
  git -C "$folder" remote add origin "$url"
  git -C "$folder" config remote.origin.promisor true
  git -C "$folder" config remote.origin.partialclonefilter blob:none
  git -C "$folder" sparse-checkout set "${@:4}"
  step timeout 600 git -C "$folder" fetch --quiet --depth 1 --filter=blob:none origin "$commit"
  step timeout 600 git -C "$folder" checkout --quiet --detach "$commit"
}

for system in "${systems[@]}"; do
  case "$system" in
    verl) fetch verl verl-project/verl 1dda039b9c6311889a9c9a26040677e1254814f9 verl ;;
    trl) fetch trl huggingface/trl f2cd57710ae345ea6428ae95363267fcf38a3dc8 trl ;;
    areal) fetch areal inclusionAI/AReaL 4aef98d8d818af55b43621aaadba047ae10f4e77 areal ;;
    slime) fetch slime THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515 slime ;;
    prime_rl) fetch prime_rl PrimeIntellect-ai/prime-rl 559b44772e471d1538537b8805cc77f3824a5e64 src packages ;;
    skyrl) fetch skyrl NovaSky-AI/SkyRL a9564572eb8e91076be43c1bd5e4615e3de17265 skyrl ;;
    nemo_rl) fetch nemo_rl NVIDIA-NeMo/RL 7ea279abfbeb698b092856d0dab61e7cf39bc909 nemo_rl ;;
    *)
      echo "compare: no system $system; choose from verl, trl, areal, slime, prime_rl, skyrl, nemo_rl" >&2
      exit 2
      ;;
  esac
done
exec "$own/bin/python" "$root/scripts/peers/compare.py" --python "$venv/bin/python" --sources "$sources" "${systems[@]}"
