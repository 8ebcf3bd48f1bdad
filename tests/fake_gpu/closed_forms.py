"""Compute by hand what the collectives of a step of ``cases.py`` are: how many, and how many bytes.

Weights are gathered in bfloat16, gradients are reduced in float32 in each micro-batch, and layers are
computed again in the backward up to the last tensor that it needs: the last product of a layer is not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentrl.distributed.mesh import Layout
from agentrl.distributed.pipeline_stages import assign_layers
from agentrl.model.flops import ModelShape
from fake_gpu import cases
from fake_gpu.cases import (
    BATCHES,
    CHOSEN,
    EXPERT_INNER,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    RANK,
    TOKENS,
    TRAINED,
    VOCABULARY,
    Case,
)

_CHUNKS = -(-TRAINED // 1024)
"""Chunks of the projection."""
_ATTENTION = 2 * HIDDEN * HEAD_DIM * (HEADS + KV_HEADS)
_LAYER_NORMS = 2 * HIDDEN
_HEAD_NORMS = 2 * HEAD_DIM


@dataclass
class Collectives:
    """Operations and their bytes, by the key of ``Recorder.calls``."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, operation: str, ranks: int, count: int, each: float) -> None:
        """Add ``count`` operations of ``each`` bytes among ``ranks``."""
        if ranks > 1 and count:
            key = f"{operation} {ranks}"
            self.calls[key] += count
            self.bytes[key] += round(count * each)


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers together."""

    numbers: int
    """After tensor and expert parallelism, padded to whole shards."""
    trained: int
    ranks: int


def expected(case: Case) -> Collectives:
    """Return the collectives of one rank in the measured step of ``case``."""
    layout, found = Layout(**case.layout), Collectives()
    stage = case.rank * layout.pp // layout.world
    layers = _stage_layers(layout, stage)
    is_first, is_last = stage == 0, stage == layout.pp - 1
    groups = [group for _ in layers for group in _layer_groups(case, layout)]
    root = _root(case, layout, is_first=is_first, is_last=is_last)
    for group in (*groups, root):
        reduced = BATCHES if group.trained else 0
        found.add("reduce_scatter_base float32", group.ranks, reduced, 4 * group.trained)
        whole = 1 if group.trained else 0
        found.add("allreduce float32", layout.dp_replicate, whole, 4 * group.trained / group.ranks)
    for group in groups:
        found.add("allgather_base bfloat16", group.ranks, 2 * BATCHES, 2 * group.numbers)
    found.add("allgather_base bfloat16", root.ranks, BATCHES, 2 * root.numbers)
    for _ in layers:
        _add_layer(found, case, layout)
    _add_ends(found, layout, is_first=is_first, is_last=is_last)
    if case.model == "reference":
        for group in (*groups, root):
            found.add("allgather_base bfloat16", group.ranks, BATCHES, 2 * group.numbers)
        for _ in layers:
            _add_layer(found, case, layout, trained=False)
        _add_ends(found, layout, is_first=is_first, is_last=is_last, trained=False)
        found.add("broadcast float32", layout.pp, 1, 2 * 4 * BATCHES * TRAINED)
    _add_norms(found, case, layout, len(layers))
    return found


def _stage_layers(layout: Layout, stage: int) -> range:
    shape = ModelShape.of(cases.model_config(Case(model="dense")))
    head = 0.5 * shape.hidden * shape.vocabulary * shape.layers / shape.layer_weights
    return assign_layers(LAYERS, layout.pp, head)[stage]


def _padded(rows: int, columns: int, ranks: int) -> int:
    """Return the numbers of a matrix whose rows are padded to whole shards."""
    return -(-rows // ranks) * ranks * columns


def _layer_groups(case: Case, layout: Layout) -> list[Group]:
    """Return the parameters of a layer; experts that ranks split are a group of their own."""
    ranks, split = layout.shard, layout.tp
    numbers = _ATTENTION // split + _LAYER_NORMS + _HEAD_NORMS
    expert = 3 * HIDDEN * EXPERT_INNER
    holders = layout.ep * layout.tp
    found = []
    dense_or_router = _padded(EXPERTS, HIDDEN, ranks) if case.is_mixture else 3 * HIDDEN * INNER // split
    numbers += dense_or_router
    if case.is_mixture and holders == 1:
        numbers += _padded(EXPERTS, expert, ranks)
    elif case.is_mixture:
        own = EXPERTS // holders * expert
        found.append(Group(own, own * (case.model != "frozen"), layout.dp_shard * layout.cp))
    trained = numbers - dense_or_router if case.model == "frozen" else numbers
    if case.model == "lora":
        trained = _adapters(ranks)
        numbers += trained
    return [Group(numbers, trained, ranks), *found]


def _adapters(ranks: int) -> int:
    """Return the numbers of the adapters of a layer's seven matrices, each [RANK, in] and [out, RANK]."""
    heads, kv_heads = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = [(HIDDEN, heads), (HIDDEN, kv_heads), (HIDDEN, kv_heads), (heads, HIDDEN)]
    matrices += [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]
    return sum(_padded(RANK, width, ranks) + _padded(out, RANK, ranks) for width, out in matrices)


def _root(case: Case, layout: Layout, *, is_first: bool, is_last: bool) -> Group:
    """Return the embedding, the last norm and the output head, as far as the stage holds them."""
    matrix = VOCABULARY * HIDDEN // layout.tp
    last = is_last * (matrix + HIDDEN)
    trained = 0 if case.model == "lora" else last + is_first * (case.model != "frozen") * matrix
    return Group(is_first * matrix + last, trained, layout.shard)


def _add_layer(found: Collectives, case: Case, layout: Layout, *, trained: bool = True) -> None:
    """Add the exchanges of one layer's activations, of its forwards and backwards in all micro-batches."""
    tokens = TOKENS // layout.cp
    states = 2 * tokens * HIDDEN
    passes = 2 if trained else 1
    # Forward: attention and MLP. Again: attention. Backward: queries, keys and values; gate and up, or the
    # rows of experts and their weights.
    sums = passes + 1 + (5 if trained else 0)
    if case.is_mixture:
        sums -= 1
        # The gradients of the routing weights; without gradients, what experts return, which DTensor sums.
        found.add("all_reduce bfloat16", layout.tp, BATCHES, 2 * tokens * CHOSEN if trained else states)
    sum_up = "all_reduce" if trained else "allreduce"  # with a gradient it is functional, not in place
    found.add(f"{sum_up} bfloat16", layout.tp, BATCHES * sums, states)
    keys = 2 * KV_HEADS // layout.tp * TOKENS * HEAD_DIM
    found.add("allgather bfloat16", layout.cp, BATCHES * 2 * passes, keys)
    found.add("reduce_scatter bfloat16", layout.cp, BATCHES * (2 if trained else 0), keys)
    rows = -(-tokens * CHOSEN // (layout.ep * layout.tp)) * layout.ep
    found.add("alltoall_base bfloat16", layout.ep, BATCHES * (6 if trained else 2), 2 * rows * HIDDEN)


def _add_ends(
    found: Collectives, layout: Layout, *, is_first: bool, is_last: bool, trained: bool = True
) -> None:
    """Add what embedding, output head and neighboring stages exchange."""
    states = 2 * TOKENS // layout.cp * HIDDEN
    if is_first:
        found.add("all_reduce bfloat16", layout.tp, BATCHES, states)
    else:
        found.add("recv bfloat16", layout.pp, BATCHES, states)
        found.add("send bfloat16", layout.pp, trained * BATCHES, states)
    if not is_last:
        found.add("send bfloat16", layout.pp, BATCHES, states)
        found.add("recv bfloat16", layout.pp, trained * BATCHES, states)
        return
    # The largest logit, and the sums of exponentials, of weighted logits and of chosen ones.
    found.add("allreduce float32", layout.tp, 4 * BATCHES * _CHUNKS, 4 * _own_targets(layout))
    found.add("allreduce bfloat16", layout.tp, trained * BATCHES, states)
    found.add("allreduce float32", layout.cp, 2 * BATCHES, 4 * TRAINED)


def _own_targets(layout: Layout) -> int:
    """Return how many trained tokens have parents in the two chunks of the first context-parallel rank."""
    chain, trained = TOKENS // 2, TRAINED // 2
    parents = {chain * (place + 1) - 1 - token for place in range(2) for token in range(1, trained + 1)}
    chunk = TOKENS // (2 * layout.cp)
    return sum(parent < chunk or parent >= TOKENS - chunk for parent in parents)


def _add_norms(found: Collectives, case: Case, layout: Layout, layers: int) -> None:
    """Add the sums of norms' partial gradients, of a step's counts and of the gradients' norm."""
    found.add("allreduce float32", layout.tp, 2 * layers, 4 * HEAD_DIM / layout.shard)
    for name in ("ep", "dp_shard", "dp_replicate"):
        found.add("allreduce float64", getattr(layout, name), 1, 3 * 8)
    # Gradients are added by how they are split: plain; by columns and by rows of tensor parallelism; experts.
    kinds = 3 if layout.tp > 1 else 1
    found.add("allreduce float64", layout.shard, kinds, 8)
    found.add("allreduce float64", layout.tp, kinds - 1, 8)
    found.add("allreduce float64", layout.pp, 1, 8)
    if case.is_mixture and case.model != "frozen" and layout.ep * layout.tp > 1:
        found.add("allreduce float64", layout.dp_shard * layout.cp, 1, 8)
        found.add("allreduce float64", layout.ep * layout.tp, 1, 8)
