"""Whether a placement fits the memory of its GPUs, by ``agentrl plan`` and by the size of the weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agentrl.config.load import parse
from agentrl.errors import ConfigError
from agentrl.local import launch
from agentrl.local.launch import MemoryCheck
from agentrl.local.placement import Gpus, Placement

pytestmark = pytest.mark.usefixtures("starts_warm")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "head_dim": 128,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Qwen3-8B's configuration."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def check(
    model: Path, *words: str, memory: float = 79.0, trainer: tuple[int, ...] = (0, 1, 2, 3),
    engines: tuple[tuple[int, ...], ...] = (), machines: int = 1, takes_turns: bool = False,
) -> list[str]:  # fmt: skip
    """Return the lines that the check reports."""
    lines: list[str] = []
    flags = ["--model_name_or_path", str(model), "--engine", "sglang", *words]
    gpus = Gpus(names=tuple("01234567"), kind="NVIDIA H100", memory_gib=(memory,) * 8)
    MemoryCheck(
        configs=parse(flags, command="agentrl launch", description="", shown=()), flags=flags,
        model=str(model), machines=machines, report=lines.append,
    ).check(
        Placement(gpus=gpus, trainer=trainer, engines=engines, takes_turns=takes_turns), os.environ
    )  # fmt: skip
    return lines


def test_weights_that_do_not_fit_an_engine_are_refused(model: Path) -> None:
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(60 * 2**30)  # a sparse file
    with pytest.raises(
        ConfigError, match=r"needs 60.0 GiB for weights alone, .* takes 39.5 of 79.0 GiB"
    ) as no:
        check(model, "--inf_mem_ratio", "0.5", trainer=(), engines=((4,), (5,)))
    assert "--inf_tp_size 2" in str(no.value.hint)
    with pytest.raises(ConfigError, match=r"takes 39.5 of 79.0 GiB"):
        check(model, trainer=(4,), engines=((4,),))
    assert check(model, "--inf_tp_size", "2", "--inf_mem_ratio", "0.5", trainer=(), engines=((4, 5),)) == []
    assert check(model, trainer=(), engines=((4,),)) == []
    assert check(model, "--check_memory", "false", engines=((4,),)) == []


def test_a_trainer_that_cannot_hold_its_weights_is_refused_with_the_planned_figure(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer does not fit GPU 0: needs \d+\.\d GiB of") as no:
        check(model, memory=24.0, trainer=(0,))
    assert "agentrl plan --model" in str(no.value.hint)
    assert "--gpus 1xH100 --gpu_memory_gib 24.00 --context 40960" in str(no.value.hint)


def test_a_shared_gpu_counts_what_the_engine_leaves_unless_they_take_turns(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"of 35\.\d"):  # 79 × 0.5, less the reserve
        check(model, trainer=(0,), engines=((0,),))
    with pytest.raises(ConfigError, match=r"of 71\.1"):
        check(model, trainer=(0,), engines=((0,),), takes_turns=True)


def test_a_layout_that_the_trainer_refuses_is_refused_at_once(model: Path) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        check(model, "--tp_size", "3", trainer=(0, 1, 2))


def test_what_cannot_be_planned_is_said_and_started(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"vision_config": {}}), encoding="utf-8")
    lines = check(model)
    assert lines[-1].startswith("the trainer's memory is not checked: agentrl plan: error:")
    monkeypatch.setattr(launch, "_PLAN_SECONDS", 0.01)
    assert check(model)[-1] == "the trainer's memory is not checked: no answer in 0.01 s"
