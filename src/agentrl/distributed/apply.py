"""Apply a layout to a model: split its layers, experts and stages, and shard it."""

from __future__ import annotations

from typing import Any

from agentrl.distributed.context_parallel import check_context
from agentrl.distributed.expert_parallel import check_experts, shard_experts
from agentrl.distributed.fsdp import GradientReduction, choose_reduction, shard_layers, shard_root
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.parallel_model import ParallelModel, PipelineModel
from agentrl.distributed.pipeline_stages import assign_model_layers, check_stages, keep_stage
from agentrl.distributed.tensor_parallel import split_layers
from agentrl.model.precision import Precision


def parallelize(
    model: Any,
    mesh: Mesh,
    *,
    max_tokens: int,
    reduction: GradientReduction = "last",
    precision: Precision | None = None,
) -> ParallelModel:
    """Split ``model``, whole and equal on every rank, over ``mesh`` in place, and return what runs it.

    Split parameters become DTensors, of which each rank holds its part. A pipeline stage keeps its own layers
    only. ``max_tokens`` is the size of a micro-batch. ``precision`` is by default that of the weights. A
    single process without a policy of mixed precision keeps the model as it is.

    Raises ConfigError for a model that the layout cannot split, and ModelError for one that computes more
    than its layers in sequence where stages need that.
    """
    layout, policy = mesh.layout, None if precision is None else precision.policy
    reduction = choose_reduction(reduction, model, layout)
    stages = assign_model_layers(model, layout.pp) if layout.pp > 1 else None
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
