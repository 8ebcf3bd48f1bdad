"""Weights are published in the model's own dtype, rounded once, and config.json says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from agentrl.errors import ModelError
from agentrl.weights.folder import stored_dtype
from agentrl.weights.snapshot import PublishedModel, model_parts, write_alone, write_config


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
