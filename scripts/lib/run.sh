# Sourced by the run scripts: set the flags of a run; `agentrl launch` starts and supervises its processes.
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
# configuration, the reason is printed and all are stopped. SIGINT and SIGTERM stop all of them within 30 s.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
case " $* " in
  *" -h "* | *" --help "*) variables=$(sed -n '/^# MODEL_PATH/,/^$/{/^#/!q;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}") ;;
esac
. "$root/scripts/lib/common.sh"

die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

RUN_NAME=${1:-}
[ -n "$RUN_NAME" ] || die "RUN_NAME is missing; usage: bash scripts/$(basename "$0") RUN_NAME [--flag VALUE …]"
shift

flags=()

# The defaults are the quickstart's model and tasks; set both to use your own.
choose_model_and_tasks() {
  local file_variable=$1 default_file=$2
  if [ -z "${MODEL_PATH:-}" ] && [ -z "${!file_variable:-}" ]; then
    printf -v "$file_variable" '%s' "$root/$default_file"
    DEMO=1
    return
  fi
  [ -n "${MODEL_PATH:-}" ] || die "$file_variable is set and MODEL_PATH is not: export MODEL_PATH=/path/to/model"
  [ -n "${!file_variable:-}" ] || die "MODEL_PATH is set and $file_variable is not: export $file_variable=/path/to/tasks.jsonl"
  [ -d "$MODEL_PATH" ] || die "MODEL_PATH is $MODEL_PATH, which is not a folder"
  [ -f "${!file_variable}" ] || die "$file_variable is ${!file_variable}, which is not a file"
}

# Flags that both training scripts share; each script adds its loss.
training_flags() {
  local warmup_steps=$1 max_turns=$2
  flags+=(
    --train_file "$TRAIN_FILE" --adv_scaling 2.0
    --learning_rate 2e-6 --lr_scheduler_type cosine --warmup_steps "$warmup_steps" --weight_decay 0.05
    --optim_args beta1=0.9,beta2=0.98 --max_grad_norm 1.0
    --num_generations 8 --groups_per_step 6 --save_steps 3
    --preferred_sampling_params '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}'
  )
  if [ -n "${TP_SIZE:-}" ]; then flags+=(--tp_size "$TP_SIZE"); fi
  if [ -n "${DEMO:-}" ]; then
    flags+=(--max_turns 4 --max_prompt_tokens 2048 --prompt_reserve_tokens 256 --max_new_tokens 64
      --max_tokens 4096)
  else
    # The model's context and the memory limit them, and a flag that you give moves the others.
    flags+=(--fit_context 161536 --fit_turns "$max_turns" --activation_checkpointing full)
  fi
}

# launch train|eval: replace this script by the process that supervises the others.
launch() {
  step bash "$root/scripts/setup.sh"
  exec "$(venv_of "$root")/bin/python" -m agentrl launch "$1" \
    --run_name "$RUN_NAME" --log_dir "logs/$RUN_NAME" --output_dir "output/$RUN_NAME" "${flags[@]}"
}
