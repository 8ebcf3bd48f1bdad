"""Weights are copied once, layer by layer, and written as transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.weights.folder import TensorChecksum, checksums
from agentrl.weights.snapshot import (
    Holding,
    PublishedModel,
    Snapshots,
    Written,
    model_parts,
    plan_files,
    write_beside,
    write_share,
)

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


def source(model: PreTrainedModel) -> PublishedModel:
    return PublishedModel(model, partial(model_parts, model), None)


def write(model: PreTrainedModel, folder: Path, limit: int) -> Written:
    folder.mkdir()
    written = write_share(folder, Snapshots.of(source(model), limit).take())
    write_beside(folder, written, source(model).configuration())
    return written


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
    written = write(model, tmp_path / "ours", limit)
    ours, theirs = on_disk(tmp_path / "ours"), on_disk(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    found = checksums(tmp_path / "ours")
    assert [file for file in found if file.name.endswith(".safetensors")] == list(written.files)
    assert written.tensors == {name: TensorChecksum.of(value) for name, value in theirs.items()}
    files = [file.name for file in written.files]
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
    convert = PublishedModel.convert

    def joins(self: PublishedModel, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return {f"{len(tensors)}.{name}": value for name, value in convert(self, tensors).items()}

    monkeypatch.setattr(PublishedModel, "convert", joins)
    write(dense(), tmp_path / "ours", LAYER_BYTES)
    assert [path.name for path in (tmp_path / "ours").glob("*.safetensors")] == ["model.safetensors"]
    assert "depend on each other" in caplog.text


def test_a_snapshot_does_not_change_and_its_memory_is_used_again() -> None:
    model = dense()
    snapshots = Snapshots.of(source(model))
    first = snapshots.take()
    before = {name: value.clone() for name, value in first.tensors.items()}
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    assert all(torch.equal(value, before[name]) for name, value in first.tensors.items())
    second = snapshots.take()
    assert torch.equal(second.tensors["model.norm.weight"], 2 * before["model.norm.weight"])
    places = {name: value.data_ptr() for name, value in first.tensors.items()}
    snapshots.release(first)
    assert {name: value.data_ptr() for name, value in snapshots.take().tensors.items()} == places


@pytest.mark.parametrize("ranks", [1, 3])
def test_layers_are_balanced_among_the_ranks_that_hold_them(ranks: int) -> None:
    """Two stages of layers with ``ranks`` ranks each: nobody writes what it does not hold."""
    model = dense(num_hidden_layers=8)
    holdings = {}
    for part in model_parts(model):
        is_late = part.name.startswith(("model.norm", "lm_head", *(f"model.layers.{n}" for n in range(4, 8))))
        like = torch.empty_like(part.like, device="meta")
        holdings[part.name] = Holding(tuple(range(ranks * is_late, ranks * (1 + is_late))), like)
    plan = plan_files(source(model), holdings, 2 * LAYER_BYTES)
    names = [name for file in plan for layer in file.layers for name in layer]
    assert sorted(names) == sorted(holdings)
    for file in plan:
        assert all(file.owner in holdings[name].ranks for layer in file.layers for name in layer)
        assert file.bytes <= 2 * LAYER_BYTES
    loads = [sum(file.bytes for file in plan if file.owner == rank) for rank in range(2 * ranks)]
    assert min(loads) > 0
    assert max(loads) - min(loads) <= 1.1 * LAYER_BYTES
    assert [file.name for file in plan] == [
        f"model-{number:05d}-of-{len(plan):05d}.safetensors" for number in range(1, len(plan) + 1)
    ]
