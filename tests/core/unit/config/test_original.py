"""Every flag of the original works, warns with what to use, or is refused with what to use."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
from parsed_flags import parsed as read

from agentrl.config.agreement import require_trainable
from agentrl.config.load import REPLACEMENTS
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

HERE = Path(__file__).parent
LINES = (HERE / "original_flags.txt").read_text(encoding="utf-8").splitlines()
NAMES = [line for line in LINES if not line.startswith("#")]
OWN = {field.name for group in GROUPS for field in dataclasses.fields(group)}


def test_every_flag_of_the_original_is_known() -> None:
    assert [name for name in NAMES if name not in OWN and name not in REPLACEMENTS] == []
    assert sorted(REPLACEMENTS.keys() - set(NAMES)) == []
    assert sorted(REPLACEMENTS.keys() & OWN) == []


@pytest.mark.parametrize("name", ["minirl", "grpo", "eval"])
def test_the_originals_scripts_are_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    text = (HERE / "original_scripts" / f"{name}.txt").read_text(encoding="utf-8")
    configs = read(*shlex.split(text, comments=True))
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
    params = read("--config", str(file))[SamplingConfig].preferred_sampling_params
    assert params == '{"presence_penalty": 1.0}'
