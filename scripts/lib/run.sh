# Sourced by the run scripts: starts the processes of a run, logs them under logs/, stops them together.
#
# MODEL_PATH        Hugging Face folder of the policy          (default: the quickstart's SmolLM2-135M)
# TRAIN_FILE        JSONL tasks (eval.sh: EVAL_FILE)           (default: the quickstart's calculator tasks)
# MONGO_URI         MongoDB ≥ 6.0, a replica set               (default: the embedded server)
# MCP_MANAGER_URL   MCP manager (…/mcpapi) or MCP endpoint     (default: the servers of MCP_SERVERS_FILE)
# MCP_SERVERS_FILE  YAML file of MCP servers                   (default: assets/mcp_servers.yml)
# AGENT_CONFIG      judge and browse endpoints                 (default: assets/agent_config.yml)
# ENGINE            local | sglang | vllm                      (default: local)
# SAMPLERS          sampler processes                          (default: 2)
# ROLES             which processes this machine runs          (default: "serve sample train")
# ACCELERATE_CONFIG accelerate configuration of the trainer    (default: none, a single process)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

RUN_NAME=${1:-}
[ -n "$RUN_NAME" ] || die "which run? usage: bash scripts/$(basename "$0") RUN_NAME [--flag VALUE …]"
shift

bash scripts/setup.sh
bin="$root/${AGENTRL_VENV:-.venv}/bin"
logs="logs/$RUN_NAME"
mkdir -p "$logs"
children=()

# The defaults train the quickstart's model on its tasks; with a model or tasks of your own, name both.
choose_model_and_tasks() {
  local file_variable=$1 default_file=$2
  if [ -z "${MODEL_PATH:-}" ] && [ -z "${!file_variable:-}" ]; then
    MODEL_PATH=$("$bin/python" - <<'PY'
import sys
from agentrl.quickstart.smollm import prepare_smollm

print(prepare_smollm(lambda text: print(text, file=sys.stderr)))
PY
    ) || die "cannot prepare the quickstart's model"
    printf -v "$file_variable" '%s' "$default_file"
    DEMO=1
  fi
  [ -n "${MODEL_PATH:-}" ] || die "$file_variable is set and MODEL_PATH is not: export MODEL_PATH=/path/to/model"
  [ -n "${!file_variable:-}" ] || die "MODEL_PATH is set and $file_variable is not: export $file_variable=/path/to/tasks.jsonl"
  [ -d "$MODEL_PATH" ] || die "MODEL_PATH is $MODEL_PATH, which is no folder"
  [ -f "${!file_variable}" ] || die "$file_variable is ${!file_variable}, which is no file"
}

common_flags() {
  flags=(
    --run_name "$RUN_NAME" --log_dir "$logs" --output_dir "output/$RUN_NAME"
    --model_name_or_path "$MODEL_PATH"
    --agent_config_path "${AGENT_CONFIG:-assets/agent_config.yml}"
  )
  if [ -n "${MONGO_URI:-}" ]; then flags+=(--db_connection_string "$MONGO_URI"); fi
  if [ -n "${MCP_MANAGER_URL:-}" ]; then
    flags+=(--mcp_manager_url "$MCP_MANAGER_URL")
  else
    flags+=(--mcp_servers_file "${MCP_SERVERS_FILE:-assets/mcp_servers.yml}")
  fi
}

# What both reinforcement-learning scripts use; the loss and its own settings are theirs.
training_flags() {
  local warmup_steps=$1 max_turns=$2
  flags+=(
    --train_file "$TRAIN_FILE" --adv_scaling 2.0
    --learning_rate 2e-6 --lr_scheduler_type cosine --warmup_steps "$warmup_steps" --weight_decay 0.05
    --optim_args beta1=0.9,beta2=0.98 --max_grad_norm 1.0
    --num_generations 8 --groups_per_step 6 --tp_size "${TP_SIZE:-1}" --save_steps 3
    --preferred_sampling_params '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}'
  )
  if [ -n "${DEMO:-}" ]; then
    flags+=(--max_turns 4 --max_prompt_tokens 2048 --prompt_reserve_tokens 256 --max_new_tokens 64
      --max_tokens 4096 --autocast_bf16 true)
  else
    flags+=(--max_turns "$max_turns" --max_prompt_tokens 128768 --max_new_tokens 32768)
  fi
}

has_role() { case " ${ROLES:-serve sample train} " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

# A few OpenMP threads a process: more than there are cores and their spinning starves everybody.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-0}" TOKENIZERS_PARALLELISM=false

start() {
  local name=$1
  shift
  "$bin/agentrl" "$@" >>"$logs/$name.out" 2>&1 &
  children+=($!)
  printf '%s: %s started (pid %s, %s)\n' "$RUN_NAME" "$name" "$!" "$logs/$name.out"
}

stop_children() {
  trap - EXIT INT TERM
  local pid
  for pid in "${children[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${children[@]}"; do wait "$pid" 2>/dev/null || true; done
}
trap stop_children EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start_database() {
  [ -n "${MONGO_URI:-}" ] || "$bin/agentrl" mongo up
}

# The server that assets/mcp_servers.yml expects at a URL.
start_demo_tools() {
  [ -n "${DEMO:-}" ] || return 0
  "$bin/python" -m agentrl.quickstart.servers.units --port 8765 >>"$logs/units-server.out" 2>&1 &
  children+=($!)
}

start_engine_and_samplers() {
  local index
  has_role serve && start engine serve "${flags[@]}" --engine "${ENGINE:-local}"
  if has_role sample; then
    for ((index = 0; index < ${SAMPLERS:-2}; index++)); do start "sampler-$index" sample "${flags[@]}"; done
  fi
  return 0
}

train() {
  if ! has_role train; then
    wait
  elif [ -n "${ACCELERATE_CONFIG:-}" ]; then
    "$bin/accelerate" launch --config_file "$ACCELERATE_CONFIG" -m agentrl.train "${flags[@]}"
  else
    "$bin/agentrl" train "${flags[@]}"
  fi
}
