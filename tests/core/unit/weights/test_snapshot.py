"""Weights are copied once, layer by layer, and written as transformers writes them, in the model's dtype."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.errors import ModelError
from agentrl.weights.folder import TensorChecksum, checksums, stored_dtype
from agentrl.weights.snapshot import (
    Holding,
    PublishedModel,
    Snapshots,
    Written,
    model_parts,
    plan_files,
    write_alone,
    write_beside,
    write_config,
    write_share,
)


@pytest.mark.parametrize("tied", [True, False])
def test_float32_weights_are_rounded_to_the_models_dtype(tmp_path: Path, tied: bool) -> None:
    model = tiny_model("qwen3", tied=tied)
    published = PublishedModel(model, lambda: model_parts(model), torch.bfloat16)
    write_alone(published, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    held = {part.name: part.make() for part in model_parts(model)}
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name], held[name].bfloat16()) for name in held)
    assert all(value.dtype == torch.float32 for value in held.values())
    assert stored_dtype(tmp_path) == "bfloat16"
    assert sum(part.bytes for part in published.parts()) == 2 * sum(map(torch.numel, held.values()))


def test_tensors_that_the_model_keeps_in_float32_are_not_rounded(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model._keep_in_fp32_modules_strict = {"layers.*.input_layernorm"}
    write_alone(PublishedModel(model, lambda: model_parts(model), torch.bfloat16), tmp_path)
    kinds = {name: value.dtype for name, value in load_file(tmp_path / "model.safetensors").items()}
    kept = {name for name, kind in kinds.items() if kind == torch.float32}
    assert kept == {f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "auto"}, "float16"),
        ({}, "float16"),
    ],
)
def test_the_dtype_of_a_folder(tmp_path: Path, config: dict[str, object], expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {torch.float16: 5, torch.float32: 4, torch.int8: 9}
    half = {str(dtype): torch.zeros(size, dtype=dtype) for dtype, size in sizes.items()}
    save_file(half, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == expected


FLAT = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("base", "written", "expected"),
    [
        pytest.param(
            {"torch_dtype": "float32", "rope_theta": 1000000, "rope_scaling": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_theta": 1000000, "rope_scaling": None,
             "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, id="older"),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8.0}}, {"rope_parameters": FLAT},
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8.0}, "rope_parameters": FLAT},
            id="older, scaled"),
        pytest.param(
            {"dtype": "float32", "rope_parameters": FLAT}, {"rope_parameters": FLAT, "head_dim": 8},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
             "rope_parameters": FLAT, "head_dim": 8}, id="newer"),
        pytest.param(
            {}, {"rope_parameters": PARTIAL},
            {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5,
             "rope_parameters": PARTIAL}, id="partial"),
        pytest.param({"quantization_config": {"bits": 8}, "architectures": ["Qwen3Model"], "made_by": "us"},
                     {"architectures": ["Qwen3ForCausalLM"]},
                     {"architectures": ["Qwen3ForCausalLM"], "made_by": "us"}, id="what the base alone has"),
        pytest.param({"text_config": {"dtype": "float32", "rope_theta": 1e6}, "vision_config": {"depth": 2}},
                     {"text_config": {"dtype": "float32", "head_dim": 8}, "vision_config": {"depth": 2}},
                     {"text_config": {"dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_theta": 1e6,
                                      "head_dim": 8}, "vision_config": {"depth": 2}}, id="parts"),
    ],
)  # fmt: skip
def test_a_configuration_keeps_the_bases_spelling_and_has_the_other_beside_it(
    base: dict[str, object], written: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    for name, content in {"base": base, "written": {"dtype": "float32", **written}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    write_config(tmp_path / "written", tmp_path / "base", "bfloat16")
    found = json.loads((tmp_path / "written" / "config.json").read_text())
    assert found == {"dtype": "bfloat16", "torch_dtype": "bfloat16", **expected}


def test_a_folder_without_a_named_dtype_counts_as_float32_and_one_that_cannot_be_read_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert stored_dtype(tmp_path) == "float32"
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
        stored_dtype(tmp_path)


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
