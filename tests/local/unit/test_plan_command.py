"""``agentrl plan``: layouts, reasons, commands; ``test_memory.py`` has its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma2Config,
    PretrainedConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from agentrl.errors import AgentRLError
from agentrl.local import cli

Plan = Callable[[Path, str], tuple[int, Any]]
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Qwen3Config(**SIZES).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """The exit code and the JSON of a plan for the model of a folder, with more flags."""

    def run(folder: Path, words: str) -> tuple[int, Any]:
        code = cli.plan(["--model", str(folder), "--context", "1024", "--json", *words.split()])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_layouts_that_fit_come_with_memory_flags_and_services(folder: Path, plan: Plan) -> None:
    words = "--learning_rate 1e-5 --dtype float32 --colocate true --inf_mem_ratio 0.5"
    code, found = plan(folder, f"--gpus 4xH100 {words}")
    assert code == 0
    turns = found["turns"]
    assert turns["in_turns"] == max(turns["engine"], turns["step"]) == 39.5
    assert turns["at_once"] == turns["engine"] + turns["step"] > 39.5
    fits = [item for item in found["layouts"] if item["state"] == "fits"]
    assert len(fits) == 3
    assert [item["seconds"] for item in fits] == sorted(item["seconds"] for item in fits)
    assert all(item["peak_bytes"] <= found["gpus"]["planned_bytes"] for item in fits)
    first = fits[0]
    assert "accelerate launch" in first["command"]
    assert "--dtype float32" in first["command"]
    assert "--max_prompt_tokens 768 --max_new_tokens 256" in first["command"]
    named = {name: size for name, size in first["layout"].items() if size > 1 and name != "dp_shard"}
    assert all(f"--{name}_size {size}" in first["command"] for name, size in named.items())
    assert found["services"]["samplers"] >= 1


def test_what_is_too_large_says_what_would_help(folder: Path, plan: Plan) -> None:
    code, found = plan(folder, "--gpus 4xH100 --gpu_memory_gib 0.001")
    assert code == cli.NOTHING_FITS
    assert {item["state"] for item in found["layouts"]} == {"too large"}
    reasons = {item["activation_checkpointing"]: item["reason"] for item in found["layouts"]}
    assert "--activation_checkpointing full or" in reasons["none"]
    assert "--activation_checkpointing" not in reasons["full"]
    assert found["services"] is None


def test_the_text_says_what_is_estimated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(folder), "--context", "1024", "--gpus", "8xH200", "--colocate", "true"]
    assert cli.plan(words) == 0
    told = capsys.readouterr().out
    assert "the engine's 111.2 GiB and the step's" in told
    for part in ("Layouts that fit", "which --tp_size 8 does not divide", "roofline", "accelerate launch"):
        assert part in told


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "flags", "reason"),
    [
        (Qwen3Config(**SIZES), "--tp_size 8", "4 attention heads, which --tp_size 8 does not divide"),
        (Qwen3Config(**SIZES), "--pp_size 8", "the model has 4 layers"),
        (Qwen3Config(**SIZES), "--ep_size 2", "no experts"),
        (Qwen3Config(**SIZES), "--tp_size 2 --lora_rank 8", "it works with layers that FSDP2 shards"),
        (StableLmConfig(**SIZES), "--tp_size 2", "no tensor-parallel plan"),
        (Qwen3MoeConfig(**SIZES, **EXPERTS), "--ep_size 4", "6 experts"),
    ],
    ids=["heads", "layers", "no experts", "adapter", "no plan", "experts"],
)
def test_says_why_a_layout_is_refused(
    tmp_path: Path, plan: Plan, config: PretrainedConfig, flags: str, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    code, found = plan(tmp_path, flags)
    assert code == cli.NOTHING_FITS
    assert any(reason in item["reason"] for item in found["refused"]), found["refused"]


def test_the_reference_model_is_counted(folder: Path, plan: Plan) -> None:
    _, plain = plan(folder, "--gpus 8xH200")
    _, found = plan(folder, "--gpus 8xH200 --kl_coef 0.01")
    before, after = (item["layouts"][0] for item in (plain, found))
    shard = 2 * plain["model"]["parameters"] // 8
    assert after["bytes_by_part"]["reference model"] == pytest.approx(shard, abs=8)
    assert after["peak_bytes"] == pytest.approx(before["peak_bytes"] + shard, abs=8)
    with pytest.raises(AgentRLError, match="--reference_model missing is not a folder"):
        cli.plan(
            ["--model", str(folder), "--context", "64", "--kl_coef", "1", "--reference_model", "missing"]
        )


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--gpus 8xP100", "--gpus: 'P100' is unknown"),
        ("--context 5000", "longer than the model's context, max_position_embeddings 4096"),
        ("--context 512 --max_tokens 256", "longer than a micro-batch"),
        ("--model missing", "--model missing is not a folder"),
        ("--model .", "has no config.json"),
    ],
)
def test_bad_input(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, error: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(AgentRLError, match=error) as raised:
        cli.plan(["--model", str(folder), *flags.split()])
    assert raised.value.exit_code == 2
    assert raised.value.hint


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (Gemma2Config(**SIZES), "Gemma2ForCausalLM does not support"),
        (Qwen2VLConfig(), "vision-language model"),
    ],
)
def test_models_that_the_trainer_cannot_serve(tmp_path: Path, config: Any, error: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(AgentRLError, match=error):
        cli.plan(["--model", str(tmp_path), "--context", "1024"])


def test_a_broken_configuration_and_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(AgentRLError, match="cannot be read"):
        cli.plan(["--model", str(tmp_path)])
    with pytest.raises(AgentRLError, match="no model is given"):
        cli.plan([])
