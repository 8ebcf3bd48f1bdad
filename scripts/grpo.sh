#!/usr/bin/env bash
# Train with GRPO (arXiv 2402.03300).
#
#   bash scripts/grpo.sh RUN_NAME [--flag VALUE …]
#   MODEL_PATH=/models/Qwen3-4B TRAIN_FILE=tasks.jsonl ENGINE=sglang bash scripts/grpo.sh my_run
#
# The environment variables are listed in scripts/lib/run.sh; further flags override those below.
set -euo pipefail
. "$(dirname "$0")/lib/run.sh"

choose_model_and_tasks TRAIN_FILE assets/tasks/calculator_train.jsonl
common_flags
flags+=(
  --train_file "$TRAIN_FILE"
  --loss_calculater GRPO --token_level_loss true
  --adv_scaling 2.0 --balance_sample true
  --learning_rate 2e-6 --lr_scheduler_type cosine --warmup_steps 5 --weight_decay 0.05
  --optim_args beta1=0.9,beta2=0.98 --max_grad_norm 1.0
  --num_generations 8 --groups_per_step 6 --tp_size "${TP_SIZE:-1}" --save_steps 3
  --preferred_sampling_params '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}'
)
if [ -n "${DEMO:-}" ]; then
  flags+=(--max_turns 4 --max_prompt_tokens 2048 --prompt_reserve_tokens 256 --max_new_tokens 64
    --max_tokens 4096 --autocast_bf16 true)
else
  flags+=(--max_turns 200 --max_prompt_tokens 128768 --max_new_tokens 32768)
fi
flags+=("$@")

start_database
start_demo_tools
start_engine_and_samplers
train
