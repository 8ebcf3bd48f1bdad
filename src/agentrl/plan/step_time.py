"""Estimate the seconds of a training step from data-sheet figures: a roofline, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.distributed.mesh import Layout
from agentrl.plan.gpus import Cluster
from agentrl.plan.model import PlannedModel
from agentrl.plan.workload import Workload

_RECOMPUTED = {"none": 1.0, "selective": 1.05, "full": 4 / 3}
"""FLOPs of a step with activation checkpointing, relative to one without."""


_LAYER_SECONDS = 3e-3
"""Time in which Python launches the kernels of a layer, forward and backward; an assumption."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step by part; ``total`` adds what is not hidden behind computation."""

    compute: float
    """Matrix products and attention."""
    bubble: float
    """Idle time of pipeline stages."""
    gather: float
    """All-gathers and reductions of FSDP2; the part beyond ``compute`` counts."""
    exchange: float
    """Exchanges of activations: tensor, context, expert and pipeline parallelism."""
    optimizer: float
    launch: float = 0.0
    """Launching kernels; a lower bound of ``compute``, for small models."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return max(self.compute, self.gather, self.launch) + self.bubble + self.exchange + self.optimizer


def estimate_step(
    model: PlannedModel,
    work: Workload,
    layout: Layout,
    cluster: Cluster,
    *,
    checkpointing: str,
    reduces_always: bool,
    element_bytes: int,
    trained: float,
    mfu: float,
) -> StepTime:
    """Return the estimate for one layout.

    ``element_bytes``: of a weight. ``trained``: the fraction of the weights that have gradients.
    ``reduces_always``: gradients are reduced in every micro-batch.
    """
    batches = work.micro_batches(layout.data)
    rank_tokens = work.rank_tokens(layout.data)
    share = rank_tokens / work.computed_tokens
    flops = model.shape.step_flops(
        rank_tokens, round(work.generated_tokens * share), round(work.pairs * share)
    )
    rate = cluster.gpu.tflops * 1e12 * mfu * layout.ranks_per_data
    compute = flops * _RECOMPUTED[checkpointing] / rate
    once = StepTime(
        compute=compute,
        bubble=compute * (layout.pp - 1) / batches,
        gather=_gather_seconds(
            model, layout, cluster, batches, element_bytes, batches if reduces_always else 1, trained
        ),
        exchange=_exchange_seconds(model, layout, cluster, rank_tokens, recomputes=checkpointing == "full"),
        optimizer=0.0,
        launch=batches * model.shape.layers / layout.pp * _LAYER_SECONDS * _RECOMPUTED[checkpointing],
    )
    held = model.parameters / (layout.tp * layout.pp * layout.shard) * trained
    return StepTime(
        compute=once.compute * work.passes,
        bubble=once.bubble * work.passes,
        gather=once.gather * work.passes,
        exchange=once.exchange * work.passes,
        launch=once.launch * work.passes,
        optimizer=work.passes * held * element_bytes * 7 / (cluster.gpu.memory_gb_s * 1e9),
    )


def _gather_seconds(
    model: PlannedModel,
    layout: Layout,
    cluster: Cluster,
    batches: int,
    element_bytes: int,
    reductions: int,
    trained: float,
) -> float:
    """Weights are gathered for forward and backward; gradients are scattered, and replicas summed."""
    part = model.parameters * element_bytes / (layout.tp * layout.pp)
    seconds = 0.0
    if layout.shard > 1:
        moved = part * (layout.shard - 1) / layout.shard
        link = cluster.link_gb_s(layout.shard * layout.tp) * 1e9
        seconds += (2 * batches + reductions * trained) * moved / link
    if layout.dp_replicate > 1:
        link = cluster.link_gb_s(cluster.count) * 1e9
        seconds += 2 * part * trained / layout.shard / link
    return seconds


def _exchange_seconds(
    model: PlannedModel, layout: Layout, cluster: Cluster, rank_tokens: int, *, recomputes: bool
) -> float:
    shape, width = model.shape, 2
    layers = shape.layers / layout.pp
    tokens = rank_tokens / layout.cp
    rounds = 3 if recomputes else 2
    seconds = 0.0
    if layout.tp > 1:
        moved = 2 * (layout.tp - 1) / layout.tp * tokens * shape.hidden * width
        seconds += 2 * rounds * layers * moved / (cluster.link_gb_s(layout.tp) * 1e9)
    if layout.cp > 1:
        states = 2 * rank_tokens * shape.kv_heads / layout.tp * shape.head_dim * width
        moved = (layout.cp - 1) / layout.cp * states
        seconds += (
            (rounds + 1) * layers * moved / (cluster.link_gb_s(layout.cp * layout.ep * layout.tp) * 1e9)
        )
    if layout.ep > 1:
        chosen = int(getattr(model.config.get_text_config(), "num_experts_per_tok", 1))
        moved = (layout.ep - 1) / layout.ep * tokens / layout.tp * chosen * shape.hidden * width
        seconds += 2 * rounds * layers * moved / (cluster.link_gb_s(layout.ep * layout.tp) * 1e9)
    if layout.pp > 1:
        moved = 2 * tokens * shape.hidden * width
        seconds += moved / (cluster.link_gb_s(cluster.count) * 1e9)
    return seconds
