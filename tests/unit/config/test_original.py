"""Every flag of the original works, warns with what to use, or is refused with what to use."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from agentrl.config.load import Configs, parse
from agentrl.config.original import REPLACEMENTS
from agentrl.config.schema import (
    GROUPS,
    EvaluationConfig,
    LossConfig,
    MemoryConfig,
    SamplingConfig,
    TrainConfig,
)
from agentrl.errors import ConfigError

NAMES = [
    line
    for line in Path(__file__).with_name("original_flags.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
OWN = {field.name for group in GROUPS for field in dataclasses.fields(group)}
SCRIPT = """
    --model_name_or_path m --trainer QwenTrainer --cpu_ram_efficient_loading true --weight_decay 0.05
    --optim_args beta1=0.9,beta2=0.98 --token_level_loss false --strict_in_bound true
    --skip_length_normalization true --max_steps 1000 --num_train_epochs 3 --adv_scaling 2.0
    --max_tokens 161536
    --loss_calculater MINIRL --max_trained_count 1 --train_file t.jsonl --dataloader_drop_last true
    --dataloader_num_workers 1 --max_grad_norm 1.0 --logging_steps 1 --learning_rate 2e-6 --warmup_steps 10
    --lr_scheduler_type cosine --bf16 --tp_size 4 --pp_size 1 --activation_offloading true
    --per_device_train_batch_size 1 --gradient_accumulation_steps 48 --seed 42 --eval_strategy no
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
"""
"""The words of its minirl_example.sh; --max_tokens there is below prompt and output together."""


def read(*words: str) -> Configs:
    return parse(words, command="agentrl train", description="", shown=[])


def test_every_flag_of_the_original_is_known() -> None:
    assert [name for name in NAMES if name not in OWN and name not in REPLACEMENTS] == []
    assert sorted(REPLACEMENTS.keys() - set(NAMES)) == []
    assert sorted(REPLACEMENTS.keys() & OWN) == []


def test_the_originals_script_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    configs = read(*shlex.split(SCRIPT))
    assert (configs[TrainConfig].tp_size, configs[SamplingConfig].max_new_tokens) == (4, 32768)
    assert configs[MemoryConfig].activation_offload
    assert configs[EvaluationConfig].eval_steps is None
    for name in ("trainer", "bf16", "logging_steps", "accelerator_config", "presence_penalty"):
        assert f"--{name} has no effect: {REPLACEMENTS[name].use}" in caplog.text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--presence_penalty 1.0", "--preferred_sampling_params"),
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
    with pytest.raises(ConfigError, match="presence_penalty 1"):
        read("--config", str(file))
