"""Every flag of the original works, warns with what to use, or is refused with what to use."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from agentrl.config.agreement import require_trainable
from agentrl.config.load import Configs, parse
from agentrl.config.original import REPLACEMENTS
from agentrl.config.schema import (
    GROUPS,
    AdapterConfig,
    EvaluationConfig,
    LossConfig,
    MemoryConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.distributed.mesh import check_flags, plan_layout
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ConfigError
from agentrl.losses.settings import check_loss

NAMES = [
    line
    for line in Path(__file__).with_name("original_flags.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
OWN = {field.name for group in GROUPS for field in dataclasses.fields(group)}
SCRIPTS = {
    "minirl": """
        --model_name_or_path m --trainer QwenTrainer --cpu_ram_efficient_loading true --weight_decay 0.05
        --optim_args beta1=0.9,beta2=0.98 --token_level_loss false --strict_in_bound true
        --skip_length_normalization true --max_steps 1000 --num_train_epochs 3 --adv_scaling 2.0
        --max_tokens 131072
        --loss_calculater MINIRL --max_trained_count 1 --train_file t.jsonl --dataloader_drop_last true
        --dataloader_num_workers 1 --max_grad_norm 1.0 --logging_steps 1 --learning_rate 2e-6
        --warmup_steps 10 --lr_scheduler_type cosine --bf16 --tp_size 4 --pp_size 1
        --activation_offloading true --per_device_train_batch_size 1 --gradient_accumulation_steps 48
        --seed 42 --eval_strategy no
        --eval_steps 5
        --run_name r --report_to swanlab --save_only_model false --save_steps 3 --dataloader_prefetch_factor 4
        --balance_sample false --accelerator_config '{"split_batches":true}' --pad_to_multiple_of 4096
        --enable_sampling true --agent_config_path assets/agent_config.yml --mcp_manager_url http://h:1/mcpapi
        --db_connection_string mongodb://h:1/r --max_new_tokens 32768 --max_prompt_tokens 128768
        --num_generations 8 --tool_call_parser qwen
        --preferred_sampling_params '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}'
        --presence_penalty 0.0 --frequency_penalty 0.0 --inf_tp_size 1 --inf_mem_ratio 0.8
        --max_concurrent_samples_per_process 4 --target_concurrency 3 --max_turns 100 --compress_history false
        --repetition_early_stop_times 4 --enable_repetition_compress false --output_dir output/r
    """,
    "grpo": """
        --model_name_or_path m --trainer QwenTrainer --cpu_ram_efficient_loading true --weight_decay 0.05
        --optim_args beta1=0.9,beta2=0.98 --token_level_loss true --max_steps 1000 --num_train_epochs 3
        --adv_scaling 2.0 --max_tokens 131072 --loss_calculater GRPO --max_trained_count 1
        --train_file t.jsonl --max_grad_norm 1.0 --learning_rate 2e-6 --warmup_steps 5
        --lr_scheduler_type cosine --bf16 --tp_size 4 --pp_size 1 --activation_offloading true
        --per_device_train_batch_size 1 --gradient_accumulation_steps 48 --eval_strategy no
        --run_name r --save_steps 3 --balance_sample true --accelerator_config '{"split_batches":true}'
        --pad_to_multiple_of 4096 --enable_sampling true --mcp_manager_url http://h:1/mcpapi
        --db_connection_string mongodb://h:1/r --max_new_tokens 32768 --max_prompt_tokens 131072
        --num_generations 8 --tool_call_parser qwen
        --preferred_sampling_params '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}'
        --presence_penalty 0.0 --frequency_penalty 0.0 --max_turns 200 --output_dir output/r
    """,
    "eval": """
        --model_name_or_path m --trainer QwenTrainer --max_tokens 131072 --train_file t.jsonl
        --enable_sampling true --num_generations 4 --run_name r --mcp_manager_url http://h:1/mcpapi
        --db_connection_string mongodb://h:1/r --max_new_tokens 32768 --max_prompt_tokens 131072
        --preferred_sampling_params '{"temperature": 1, "top_p": 1}' --presence_penalty 1.0
        --new_context discard_all --max_turns 200 --output_dir output/r
    """,
}
"""The words of its three example scripts; only the model and paths are replaced."""


def read(*words: str) -> Configs:
    return parse(words, command="agentrl train", description="", shown=[])


def test_every_flag_of_the_original_is_known() -> None:
    assert [name for name in NAMES if name not in OWN and name not in REPLACEMENTS] == []
    assert sorted(REPLACEMENTS.keys() - set(NAMES)) == []
    assert sorted(REPLACEMENTS.keys() & OWN) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_originals_scripts_are_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    configs = read(*shlex.split(SCRIPTS[name]))
    require_trainable(configs)
    sampling = configs[SamplingConfig]
    params = SamplingParams.from_json(sampling.preferred_sampling_params)
    assert (configs[TrainConfig].max_tokens, sampling.max_new_tokens) == (131072, 32768)
    assert params.presence_penalty == (1.0 if name == "eval" else 0.0)
    assert params.temperature == 1.0
    if name == "eval":
        return
    assert configs[TrainConfig].groups_per_step * configs[TaskConfig].num_generations == 48
    assert configs[MemoryConfig].activation_offload
    check_loss(configs)
    check_flags(plan_layout(configs[TrainConfig], 8), configs[AdapterConfig], configs[MemoryConfig])
    assert configs[EvaluationConfig].eval_steps is None
    for flag in ("trainer", "bf16", "accelerator_config"):
        assert f"--{flag} has no effect: {REPLACEMENTS[flag].use}" in caplog.text


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ("--gradient_accumulation_steps 48", 6),
        ("--gradient_accumulation_steps 6 --per_device_train_batch_size 2 --num_generations 4", 3),
        ("--gradient_accumulation_steps 9 --groups_per_step 2", 2),
        ("--gradient_accumulation_steps 1", 1),
        ("--per_device_train_batch_size 3", TrainConfig.groups_per_step),
    ],
)
def test_accumulated_trajectories_are_groups(words: str, groups: int) -> None:
    assert read(*words.split())[TrainConfig].groups_per_step == groups


@pytest.mark.parametrize(
    "words",
    [
        ["--gradient_accumulation_steps", "48", "--groups_per_step", "4"],
        ["--presence_penalty", "0.5", "--preferred_sampling_params", '{"presence_penalty": 1}'],
    ],
)
def test_two_ways_to_give_a_value_may_not_disagree(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="leave one of the two out"):
        read(*words)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--compress_history", "--new_context discard_all"),
        ("--eval-strategy=steps", "--eval_steps"),
        ("--skip_non_positive_advantage true", "--group_filter"),
        ("--inf_ep_size 2", "--engine_args"),
    ],
)
def test_what_would_change_the_run_is_refused_with_what_to_use(words: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(*words.split())
    assert hint in str(refused.value.hint)


def test_a_token_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        read("--mcp_auth_token", "s3cret")
    assert "s3cret" not in str(refused.value)
    assert "--mcp_auth_token_env" in str(refused.value.hint)


def test_a_file_may_have_them_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("beta1: 0.5\nbf16: true\npresence_penalty: 0.0\n")
    assert read("--config", str(file))[LossConfig].ce_grpo_beta_1 == 0.5
    assert "--beta1 is --ce_grpo_beta_1 here" in caplog.text
    file.write_text("presence_penalty: 1.0\n")
    assert (
        read("--config", str(file))[SamplingConfig].preferred_sampling_params == '{"presence_penalty": 1.0}'
    )
