"""Loaded means as stored: every loader refuses the same folders, and takes the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import write_tiny_policy
from torch import Tensor

from agentrl.config.schema import ModelConfig
from agentrl.distributed.load_shards import load_shards
from agentrl.errors import ModelError
from agentrl.local.engine.model import LocalModel
from agentrl.model.load import empty_model, load_model

Tensors = dict[str, Tensor]
CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_by_shards(folder: Path) -> None:
    config = ModelConfig()
    load_shards(empty_model(folder, config, torch.float32), folder, CPU, config)


LOADERS: dict[str, Callable[[Path], object]] = {
    "one process": lambda folder: load_model(folder, ModelConfig(), torch.float32),
    "shards": load_by_shards,
    "local engine": lambda folder: LocalModel(str(folder), dtype=torch.float32, device=CPU),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("base") / "tiny")


def renamed(tensors: Tensors) -> Tensors:
    return {f"backbone.{name}": value for name, value in tensors.items()}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_more(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(shape)}


def with_head(factor: float) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {HEAD: factor * tensors[EMBEDDING]}


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, object], str]] = {
    "all renamed": (renamed, {}, r"lack \d+ tensors of Qwen3ForCausalLM: .*; they have backbone\.model"),
    "one missing": (without("model.layers.1.mlp.up_proj.weight"), {}, r"lack 1 tensors .*layers\.1\.mlp\.up"),
    "no head, not tied": (dict, {"tie_word_embeddings": False}, r"lack 1 tensors .*lm_head\.weight"),
    "a head of its own, tied": (with_head(2.0), {}, "the files hold different values"),
    "fewer layers": (dict, {"num_hidden_layers": 1, "layer_types": None}, r"leaves out \d+ .*layers\.1\.inp"),
    "a bias": (with_more("model.layers.0.self_attn.q_proj.bias", 32), {}, r"leaves out 1 .*q_proj\.bias"),
    "a scale": (with_more("model.layers.0.mlp.up_proj.weight_scale_inv", 1), {}, r"leaves out 1 .*scale_inv"),
    "an adapter": (with_more("model.layers.0.mlp.up_proj.lora_A.default.weight", 4, 32), {}, r"lora_A\.def"),
}
TAKEN: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, object]]] = {
    "the tied head twice": (with_head(1.0), {}),
    "a head of its own": (with_head(2.0), {"tie_word_embeddings": False}),
    "layers that predict more": (with_more("mtp.layers.0.mlp.up_proj.weight", 2, 2), {}),
    "one after the last": (with_more("model.layers.2.eh_proj.weight", 2, 2), {"num_nextn_predict_layers": 1}),
    "old buffers": (with_more("model.layers.0.self_attn.rotary_emb.inv_freq", 4), {}),
    "a head for scores": (with_more("score.weight", 1, 32), {}),
}


def write(base: Path, folder: Path, change: Callable[[Tensors], Tensors], flags: dict[str, object]) -> Path:
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = change(load_file(base / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = {**json.loads((base / "config.json").read_text()), **flags}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_are_not_those_of_the_folder_are_refused(
    case: str, loader: str, base: Path, tmp_path: Path
) -> None:
    change, flags, says = REFUSED[case]
    with pytest.raises(ModelError, match=says):
        LOADERS[loader](write(base, tmp_path, change, flags))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("case", TAKEN)
def test_tensors_beside_the_model_do_no_harm(case: str, loader: str, base: Path, tmp_path: Path) -> None:
    LOADERS[loader](write(base, tmp_path, *TAKEN[case]))


def test_an_update_of_an_engine_is_checked_like_a_folder(base: Path) -> None:
    served = LocalModel(str(base), dtype=torch.float32, device=CPU)
    with pytest.raises(ModelError, match=r"the weights in the update lack \d+ tensors"):
        served.updated_from(renamed(load_file(base / "model.safetensors")))
