"""Estimate a step's seconds by a roofline, and size samplers, engines and database for the trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.distributed.mesh import Layout
from agentrl.plan.model import PlannedModel
from agentrl.plan.workload import Cluster, Gpu, Workload

_RECOMPUTED = {"none": 1.0, "selective": 1.05, "full": 4 / 3}
"""FLOPs of a step with activation checkpointing, relative to one without."""


_LAYER_SECONDS = 3e-3
"""Time in which Python launches the kernels of a layer, forward and backward; an assumption."""
_SAMPLER_MS = ((6_000, 1.4), (75_000, 2.8))
"""(tokens of context, CPU milliseconds a turn) of a sampler."""
_GATEWAY_MS = ((6_000, 6.9), (75_000, 9.1))
"""The same for a call through the gateway."""
_SAMPLER_MIB = 516 / 1000
"""Memory per concurrent trajectory of 6K tokens."""
_MONGOD_TRAJECTORIES = 17.3 / 0.499
"""Trajectories per second and core of mongod, with 1,000 samplers."""
_STORED_BYTES = 215 * 1024 / 20_000
"""Bytes on disk per token of a trajectory of 20 turns."""
_BUSY = 0.5
"""Fraction of a core that is planned to be used."""
_BANDWIDTH_SHARE = 0.6
"""Fraction of the memory bandwidth that decoding is assumed to reach."""
_KV_SHARE = 0.85
"""Fraction of a GPU's memory for an engine's weights and KV cache."""
_MOST_REQUESTS = 256
"""Requests that an engine decodes at once, at most; an assumption."""
_DECODE_SECONDS = 0.004
"""Shortest time in which an engine decodes one token of all its requests; an assumption."""
_ENGINE_BYTES = 2
"""Bytes of a weight and of a KV entry in an engine: bfloat16."""


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
    gather = _gather_seconds(
        model, layout, cluster, batches, element_bytes, batches if reduces_always else 1, trained
    )
    exchange = _exchange_seconds(model, layout, cluster, rank_tokens, recomputes=checkpointing == "full")
    launch = batches * model.shape.layers / layout.pp * _LAYER_SECONDS * _RECOMPUTED[checkpointing]
    held = model.parameters / (layout.tp * layout.pp * layout.shard) * trained
    return StepTime(
        compute=compute * work.passes,
        bubble=compute * (layout.pp - 1) / batches * work.passes,
        gather=gather * work.passes,
        exchange=exchange * work.passes,
        launch=launch * work.passes,
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


@dataclass(frozen=True, kw_only=True)
class Services:
    """What keeps a trainer supplied with trajectories."""

    trajectories_per_second: float
    turns_per_second: float
    generated_per_second: float
    in_flight: int
    """Trajectories that are sampled at the same time."""
    sampler_cores: float
    samplers: int
    """Processes, each of one core."""
    sampler_memory_gib: float
    """Of all samplers together."""
    gateway_cores: float
    """If all calls go through gateways."""
    engine_gpu: str
    engine_tp: int
    """GPUs of one engine."""
    engine_tokens_per_second: float
    """Generated by one engine; a roofline estimate."""
    engines: int
    mongod_cores: float
    stored_gib_per_hour: float
    database_nodes: int
    """Members of the replica set: one stores, three also survive the loss of a machine."""


def size_services(
    model: PlannedModel,
    work: Workload,
    step_seconds: float,
    gpu: Gpu,
    *,
    request_tokens_per_second: float,
    tool_seconds: float,
) -> Services:
    """Return the services that deliver a step's trajectories every ``step_seconds``."""
    rate = work.trajectories / step_seconds
    turns = rate * work.turns
    generated = work.generated_tokens / step_seconds
    seconds = work.generated_tokens / work.trajectories / request_tokens_per_second
    in_flight = max(1, math.ceil(rate * (seconds + work.turns * tool_seconds)))
    context = work.trajectory_tokens / 2
    cores = turns * _at(_SAMPLER_MS, context) / 1000
    ranks, speed, slots = _engine(model, gpu, work.trajectory_tokens)
    decoding = in_flight * seconds / (seconds + work.turns * tool_seconds)
    return Services(
        trajectories_per_second=rate,
        turns_per_second=turns,
        generated_per_second=generated,
        in_flight=in_flight,
        sampler_cores=cores,
        samplers=max(1, math.ceil(cores / _BUSY)),
        sampler_memory_gib=in_flight * _SAMPLER_MIB * max(1.0, work.trajectory_tokens / 6_000) / 1024,
        gateway_cores=turns * _at(_GATEWAY_MS, context) / 1000,
        engine_gpu=gpu.name,
        engine_tp=ranks,
        engine_tokens_per_second=speed,
        engines=max(1, math.ceil(generated / speed), math.ceil(decoding / slots)),
        mongod_cores=rate / _MONGOD_TRAJECTORIES,
        stored_gib_per_hour=rate * work.trajectory_tokens * _STORED_BYTES * 3600 / 2**30,
        database_nodes=3,
    )


def _engine(model: PlannedModel, gpu: Gpu, tokens: int) -> tuple[int, float, int]:
    """Return (GPUs of an engine, its tokens/s, requests that its KV cache holds at their mean length).

    Decoding reads the weights once per step, and each request's KV cache. In a mixture of experts it reads
    all experts: a batch uses most of them.
    """
    weights = model.parameters * _ENGINE_BYTES
    entry = 2 * model.shape.layers * model.shape.kv_heads * model.shape.head_dim * _ENGINE_BYTES
    memory, ranks = gpu.memory_gib * 2**30 * _KV_SHARE, 1
    while ranks < 64 and memory * ranks - weights < entry * tokens + 0.2 * memory * ranks:
        ranks *= 2
    slots = min(_MOST_REQUESTS, max(1, int((memory * ranks - weights) / (entry * tokens / 2))))
    bandwidth = gpu.memory_gb_s * 1e9 * _BANDWIDTH_SHARE * ranks
    step = (weights + slots * entry * tokens / 2) / bandwidth
    compute = 2 * slots * model.shape.layer_weights / (gpu.tflops * 1e12 * _BANDWIDTH_SHARE * ranks)
    return ranks, slots / max(step, compute, _DECODE_SECONDS), slots


def _at(points: tuple[tuple[int, float], tuple[int, float]], tokens: float) -> float:
    """Return the value at ``tokens``, on the line through two measured points, not below the first."""
    (low, first), (high, second) = points
    return max(first, first + (second - first) * (tokens - low) / (high - low))
