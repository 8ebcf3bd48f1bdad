"""Weights are written one file at a time, as transformers writes them, with one file in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peak_memory import peak_allocated
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.weights import sharded_writer
from agentrl.weights.sharded_writer import Part, model_parts, write_files

NUMBERS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LAYER_BYTES = 30_000


def mixture() -> PreTrainedModel:
    config = Qwen3MoeConfig(**NUMBERS, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    return Qwen3MoeForCausalLM(config)


def dense(**numbers: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**(NUMBERS | numbers)))


def write(model: PreTrainedModel, folder: Path, limit: int) -> None:
    folder.mkdir()
    write_files(model, folder, list(model_parts(model)), lambda part: part.make().clone(), limit)


def on_disk(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("limit", [LAYER_BYTES, 1 << 30])
@pytest.mark.parametrize("make", [dense, mixture])
def test_it_is_what_transformers_writes_and_reads(
    make: type[PreTrainedModel], limit: int, tied: bool, tmp_path: Path
) -> None:
    model = make()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(tmp_path / "theirs")
    write(model, tmp_path / "ours", limit)
    ours, theirs = on_disk(tmp_path / "ours"), on_disk(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert (len(files) > 3) is (limit == LAYER_BYTES)
    assert (files == ["model.safetensors"]) is (limit != LAYER_BYTES)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert not [path for path in (tmp_path / "ours").iterdir() if path.is_dir()]


def test_fused_experts_are_split(tmp_path: Path) -> None:
    write(mixture(), tmp_path / "ours", LAYER_BYTES)
    assert "model.layers.2.mlp.experts.3.gate_proj.weight" in on_disk(tmp_path / "ours")


def test_a_model_that_cannot_be_split_by_layer_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def names(_: object, files: list[list[Part]]) -> set[int]:
        return {len(files)}

    monkeypatch.setattr(sharded_writer, "_original_names", names)
    write(dense(), tmp_path / "ours", LAYER_BYTES)
    assert [path.name for path in (tmp_path / "ours").glob("*.safetensors")] == ["model.safetensors"]
    assert "written as one file" in caplog.text


def test_one_file_of_weights_is_in_memory(tmp_path: Path) -> None:
    model = dense(hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    assert isinstance(model, nn.Module)
    largest = max(part.bytes for part in model_parts(model))
    whole = sum(part.bytes for part in model_parts(model))
    layer = whole // 8
    peak = peak_allocated(lambda: write(model, tmp_path / "ours", layer))
    assert peak < layer + 2 * largest < whole / 4
