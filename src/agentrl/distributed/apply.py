"""Apply a layout to a model: split its layers, experts and stages, and shard it.

transformers splits the modules by the plan in the model's configuration.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from agentrl.distributed.context_parallel import check_context
from agentrl.distributed.expert_parallel import check_experts, is_experts, shard_experts
from agentrl.distributed.fsdp import (
    GradientReduction,
    choose_reduction,
    mark_partial,
    shard_layers,
    shard_root,
)
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.parallel_model import ParallelModel, PipelineModel
from agentrl.distributed.pipeline_stages import assign_model_layers, check_stages, keep_stage
from agentrl.errors import ConfigError
from agentrl.model.flops import Precision

PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
"""transformers' name for a module that every rank holds whole and applies to its own heads."""

_LINEAR = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")


def split_layers(model: Any, mesh: Mesh) -> None:
    """Split a Hugging Face causal LM by its configuration's plan, and its vocabulary by rows.

    Modules that each rank applies to its own heads (norms of queries and keys) stay whole, and are marked for
    ``sum_partial_gradients``. Raises as ``layer_styles``.
    """
    styles = layer_styles(model, mesh.layout.tp)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    for name, module in model.named_modules():
        if model.tp_plan.get(replace_layer_number_by_wildcard(name)) == PARTIAL_GRADIENT:
            # transformers' hook sums what earlier micro-batches have accumulated, once more with each: the
            # exactness suite's gradient norm is then 4.5 times what it should be.
            mark_partial(module)
    apply_tensor_parallelism(model, mesh.dense["tp"], styles)
    # Tie again: the split gave the embedding another parameter, and the head still has the whole one.
    if is_tied:
        head.weight = embedding.weight


def layer_styles(model: Any, size: int) -> dict[str, str]:
    """Return transformers' style of splitting each module and parameter over ``size`` ranks, by name.

    Raises ConfigError for heads, sizes or layers that cannot be split.
    """
    kind, config = type(model).__name__, model.config.get_text_config()
    check_divides(kind, config, size)
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(f"--tp_size: {kind} has no tensor-parallel plan", hint="set --tp_size 1")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        if module is embedding:
            style: str | None = "embedding_rowwise"
        elif module is head:
            style = None if head.weight is embedding.weight else "colwise"
        else:
            style = _layer_style(model, name, module)
        if style is not None:
            parameters = [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
            styles |= dict.fromkeys([*parameters, name], style)
    return styles


def _layer_style(model: Any, name: str, module: nn.Module) -> str | None:
    """Return transformers' style of splitting ``module``; None for one that stays as it is."""
    style: str | None = model.tp_plan.get(replace_layer_number_by_wildcard(name))
    if style in (None, PARTIAL_GRADIENT) or is_experts(module):
        return None
    if style not in _LINEAR or not isinstance(module, nn.Linear):
        raise ConfigError(
            f"--tp_size: {type(model).__name__} has {name} ({type(module).__name__}, plan {style!r}), which"
            " cannot be split over processes",
            hint="set --tp_size 1, or train a model with separate projections (Llama, Qwen3, Mistral)",
        )
    return style


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
            hint = "choose a --tp_size that divides them"
            if key == "vocab_size":
                hint += f", or resize the model's embeddings to {-(-count // size) * size}"
            raise ConfigError(f"{name} has {count} {what}, which --tp_size {size} does not divide", hint=hint)


def parallelize(
    model: Any,
    mesh: Mesh,
    *,
    max_tokens: int,
    reduction: GradientReduction = "last",
    precision: Precision | None = None,
) -> ParallelModel:
    """Split ``model``, whole and equal on every rank, over ``mesh`` in index, and return what runs it.

    Split parameters become DTensors, of which each rank holds its part. A pipeline stage keeps its own layers
    only. ``max_tokens`` is the size of a micro-batch. ``precision`` is by default that of the weights. A
    single process without a policy of mixed precision keeps the model as it is.

    Raises ConfigError for a model that the layout cannot split, and ModelError for one that computes more
    than its layers in sequence where stages need that.
    """
    layout, policy = mesh.layout, None if precision is None else precision.policy
    # Choose before the split, after which a rank sees only its part of the bytes.
    reduction = choose_reduction(reduction, model, layout)
    stages = assign_model_layers(model, layout.pp) if layout.pp > 1 else None
    # Check everything before the first change: a model that is refused stays whole.
    if layout.cp > 1:
        check_context(model, max_tokens)
    check_experts(model, layout)
    if stages:
        check_stages(model, stages)
    if layout.tp > 1:
        split_layers(model, mesh)
    if stages:
        keep_stage(model, mesh.coordinate("pp"), stages)
    if layout.ep * layout.tp > 1:
        shard_experts(model, mesh, policy)
    uses_fsdp = layout.uses_fsdp or policy is not None
    if uses_fsdp:
        shard_layers(model, mesh, policy)
    kind = PipelineModel if stages else ParallelModel
    products = model.dtype if precision is None else precision.products
    parallel = kind(model, mesh, reduction=reduction, products=products)
    if uses_fsdp:
        shard_root(parallel, mesh, policy)
    return parallel
