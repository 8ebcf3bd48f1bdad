# Sourced by the run scripts: `agentrl launch` starts and supervises the processes of a recipe (assets/recipes).
#
# MODEL_PATH        Hugging Face folder of the policy          (default: the quickstart's SmolLM2-135M)
# TRAIN_FILE        JSONL tasks (eval.sh: EVAL_FILE)           (default: the quickstart's calculator tasks)
# MONGO_URI         MongoDB ≥ 6.0, a replica set               (default: the embedded server, which stays up)
# MONGO_URI_FILE    file with that URI                         (default: none)
# MCP_MANAGER_URL   MCP manager (…/mcpapi) or MCP endpoint     (default: the servers in MCP_SERVERS_FILE)
# MCP_SERVERS_FILE  YAML file of MCP servers                   (default: assets/mcp_servers.yml if tasks name tools)
# AGENT_CONFIG      judge and browse endpoints                 (default: assets/agent_config.yml)
# ENGINE            local | sglang | vllm                      (default: local)
# SAMPLERS          sampler processes                          (default: 2)
# ROLES             processes of this machine                  (default: "serve sample train")
# ACCELERATE_CONFIG accelerate configuration of the trainer    (default: none, torchrun)
#
# Engines and the trainer get GPUs of their own, half each; --train_gpus 0-5 --engine_gpus 6,7 divides them otherwise,
# and every --inf_tp_size of the engines' GPUs run one engine. One GPU is shared.
#
# Paths are relative to the folder in which you start the script. Modules of yours there are found, and .agentrl, logs
# and output are made there. The logs are in logs/RUN_NAME. A process that crashes is restarted, up to five times. If one ends because of its
# configuration, the reason is printed and all are stopped. SIGINT and SIGTERM stop all of them within
# 35 s, and the trainer when it has finished its step and saved: a line counts down; a second one ends it at once.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
case " $* " in
  *" -h "* | *" --help "*) variables=$(sed -n '/^# MODEL_PATH/,/^$/{/^#/!q;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}") ;;
esac
. "$root/scripts/lib/common.sh"

# launch train|eval RECIPE RUN_NAME [--flag VALUE …]: replace this script by the process that supervises the others.
launch() {
  local command=$1 recipe=$2 name=${3:-}
  if [ -z "$name" ]; then
    printf '%s: RUN_NAME is missing; usage: bash scripts/%s RUN_NAME [--flag VALUE …]\n' "${0##*/}" "${0##*/}" >&2
    exit 2
  fi
  shift 3
  step bash "$root/scripts/setup.sh"
  exec "$(venv_of "$root")/bin/python" -m agentrl launch "$command" --recipe "$recipe" \
    --run_name "$name" --log_dir "logs/$name" --output_dir "output/$name" "$@"
}
