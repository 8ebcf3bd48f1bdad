"""Tensor parallelism: split a layer's matrices over ranks that compute the same tokens (DTensor)."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from agentrl.distributed.expert_parallel import is_experts
from agentrl.distributed.gradients import mark_partial
from agentrl.distributed.mesh import Mesh
from agentrl.errors import ConfigError

PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
"""transformers' name for a module that every rank holds whole and applies to its own heads."""

_LINEAR = ("colwise", "rowwise")


def split_layers(model: Any, mesh: Mesh) -> None:
    """Split a Hugging Face causal LM by its configuration's plan, and its vocabulary by rows.

    Modules that each rank applies to its own heads (norms of queries and keys) stay whole, and are marked for
    ``sum_partial_gradients``. Raises ConfigError for heads, sizes or layers that cannot be split.
    """
    size = mesh.layout.tp
    config = model.config.get_text_config()
    check_divides(type(model).__name__, config, size)
    decoder = model.get_decoder()
    styles = _layer_styles(decoder, config)
    devices = mesh.dense["tp"]
    parallelize_module(decoder, devices, styles)
    for name, module in decoder.named_modules():
        if _planned(name, config) == PARTIAL_GRADIENT:
            mark_partial(module)
    _split_vocabulary(model, devices)


def _layer_styles(decoder: nn.Module, config: Any) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for name, module in decoder.named_modules():
        style = _planned(name, config)
        if style in (None, PARTIAL_GRADIENT) or is_experts(module):
            continue
        if style not in _LINEAR or not isinstance(module, nn.Linear):
            raise ConfigError(
                f"--tp_size: {type(decoder).__name__} has {name} ({type(module).__name__}, plan {style!r}),"
                " which cannot be split over processes",
                hint="set --tp_size 1, or train a model with separate projections (Llama, Qwen3, Mistral)",
            )
        styles[name] = ColwiseParallel() if style == "colwise" else RowwiseParallel()
    if not styles:
        raise ConfigError(
            f"--tp_size: {type(decoder).__name__} has no tensor-parallel plan", hint="set --tp_size 1"
        )
    return styles


def _planned(name: str, config: Any) -> str | None:
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _split_vocabulary(model: Any, devices: Any) -> None:
    """Split embedding and output head by rows of the vocabulary; tied ones stay one tensor."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    parallelize_module(embedding, devices, RowwiseParallel(input_layouts=Replicate()))
    if tied:
        head.weight = embedding.weight
    else:
        parallelize_module(head, devices, ColwiseParallel(output_layouts=Shard(-1)))


def check_divides(name: str, config: Any, size: int) -> None:
    """Raise ConfigError if ``size`` does not divide heads, features or vocabulary."""
    for key, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key-value heads"),
        ("intermediate_size", "intermediate features"),
        ("vocab_size", "ids of vocabulary"),
    ):
        count = getattr(config, key, None)
        if count is not None and count % size:
            raise ConfigError(
                f"{name} has {count} {what}, which --tp_size {size} does not divide",
                hint="choose a --tp_size that divides them" + _padding_hint(key, int(count), size),
            )


def _padding_hint(key: str, count: int, size: int) -> str:
    if key != "vocab_size":
        return ""
    padded = -(-count // size) * size
    return f", or resize the model's embeddings to {padded}"
