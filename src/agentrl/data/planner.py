"""Plan the micro-batches of a step: cut its trees, pack them under a token budget, balance the ranks."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from agentrl.base.batches import batches
from agentrl.data.forest import (
    TokenForest,
    cut,
    forest_from_data,
    forest_from_sequences,
    join,
    merge_prefixes,
    restrict,
    split_paths,
)
from agentrl.documents.model_call import ExpertShape
from agentrl.documents.training import DBRecordData
from agentrl.errors import ConfigError, ForestError

PrefixMerging = Literal["off", "trajectory", "group"]

CPU_FILL = 1024
"""Largest micro-batch that is efficient on a CPU, in tokens; larger activations leave its cache."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """How a model runs trees that no attention mask makes exact: each path as a sequence of its own."""

    above: int
    """Tokens of the deepest tree that a mask makes exact; 0: none."""
    padded: bool
    """The paths of a micro-batch run in one call, each padded to the longest."""


def build_micro_batches(
    data: Sequence[DBRecordData],
    max_tokens: int,
    *,
    vocab_size: int,
    merging: PrefixMerging = "group",
    ranks: int = 1,
    fill: int | None = None,
    ages: Mapping[int, int] | None = None,
    rows: SequenceRows | None = None,
    experts: ExpertShape | None = None,
) -> list[TokenForest]:
    """Return the micro-batches of one optimizer step, each of at most ``max_tokens`` tokens.

    With ``rows``, deeper trees are split into paths and packed apart from the others; if they are padded,
    ``max_tokens`` limits their positions, padding included. A mask cannot merge them, so each path counts.

    ``merging`` selects what becomes one tree: ``off`` a model call, ``trajectory`` a trajectory (a chain
    unless its context was reset), ``group`` a group. With ``group``, the trees of a micro-batch also merge
    the context that groups have in common. A tree above ``max_tokens`` is cut at branch points, so a
    trajectory may be split over micro-batches and ranks (``TokenForest.holds_parts``). ``fill`` is a
    second, smaller limit for ``off`` and ``trajectory``, raised to the longest tree; ``group`` ignores it,
    because larger micro-batches merge more context. ``ages``, ``experts``: see ``forest_from_data``.

    The plan is a function of the arguments. Rank r of ``ranks`` runs ``[r::ranks]``: all ranks run the same
    number of micro-batches, with nearly equal tokens in each round and in total. If there is too little work,
    some micro-batches are one token that trains nothing; without data, that is each rank's only one.

    Raises ConfigError, with the trajectory's id, for a sequence above ``max_tokens``; ForestError for data
    that are not a forest.
    """
    names = [item.id for item in data]
    trees = step_trees(data, vocab_size=vocab_size, merging=merging, ages=ages, experts=experts)
    paths: list[TokenForest] = []
    if rows is not None:
        paths = [path for tree in trees if tree.depth > rows.above for path in split_paths(tree)]
        trees = [tree for tree in trees if tree.depth <= rows.above]
    limit = max_tokens
    if ranks > 1:  # above an even part of the step, or the longest path in it, a tree is cut
        even = -(-sum(tree.tokens for tree in trees) // ranks)
        limit = min(max_tokens, max([even, *(tree.depth for tree in trees)]))
    parts = [part for tree in trees for part in cut(tree, limit, names)]
    sizes, lengths = ([forest.tokens for forest in forests] for forests in (parts, paths))
    if fill is not None and merging != "group":
        max_tokens = min(max_tokens, max([fill, *sizes, *lengths]))
    plan = balance(sizes, max_tokens, ranks)
    path_plan = balance(lengths, max_tokens, ranks, padded=rows is not None and rows.padded)
    if not data:  # gradients of 0 let the optimizer decay its moments and the weights
        plan = [[] for _ in range(ranks)]
    return [_micro_batch([parts[index] for index in chosen], merging) for chosen in plan] + [
        _micro_batch([paths[index] for index in chosen], "off") for chosen in path_plan
    ]


def step_trees(
    data: Sequence[DBRecordData],
    *,
    vocab_size: int,
    merging: PrefixMerging,
    ages: Mapping[int, int] | None = None,
    experts: ExpertShape | None = None,
) -> list[TokenForest]:
    """Return the trees that a plan packs: one per model call, trajectory or group. Trajectory i is data[i].

    Leaves out tokens that no trainable token follows: no loss depends on them. ``ages``, ``experts``: see
    ``forest_from_data``.
    """
    made: list[TokenForest] = []
    groups: dict[str, list[TokenForest]] = {}
    for index, item in enumerate(data):
        tree = forest_from_data([item], vocab_size=vocab_size, ages=ages, experts=experts)
        # Number by the step before trees are cut: parts of a trajectory may land on several ranks.
        tree = replace(tree, trajectory=np.array([index]), owner=np.where(tree.owner < 0, -1, index))
        if tree.trainable_tokens == 0:
            continue
        if merging == "off":
            calls = np.repeat(
                [span.call for span in item.spans], [span.end - span.start for span in item.spans]
            )
            made += [restrict(tree, calls == call) for call in np.unique(calls)]
            continue
        tree = merge_prefixes(restrict(tree, np.ones(tree.trainable_tokens, np.bool_)))
        if merging == "trajectory":
            made.append(tree)
        else:
            groups.setdefault(item.task, []).append(tree)
    return made or [merge_prefixes(join(trees)) for trees in groups.values()]


def packing_problem(
    data: DBRecordData,
    *,
    vocab_size: int,
    max_tokens: int,
    context: int | None = None,
    column: str | None = None,
) -> str | None:
    """Return why a step cannot train ``data``; None if it can. One bad document must not end the training.

    Finds everything that packing refuses: arrays whose length contradicts the document, overlapping spans,
    values that are not finite, ids outside [0, ``vocab_size``), no trainable token, and a sequence up to the
    last trainable token that is longer than a micro-batch of ``max_tokens``; besides, one longer than the
    model's ``context``, and tokens without a value in ``column``, which the loss reads.
    """
    try:
        forest = forest_from_data([data], vocab_size=vocab_size)
    except ForestError as error:
        return error.message.removeprefix(f"training data {data.id}: ")
    except ValueError as error:
        return f"its packed arrays cannot be read: {error}"
    if forest.trainable_tokens == 0:
        return "it has no trainable token"
    longest = int(forest.position_ids[forest.target].max()) + 1
    if longest > max_tokens:
        return f"a sequence of {longest} tokens is longer than a micro-batch of --max_tokens {max_tokens}"
    if context is not None and longest > context:
        return f"a sequence of {longest} tokens is longer than the model's context of {context}"
    values = None if column is None or forest.columns is None else forest.columns.values.get(column)
    lacking = forest.trainable_tokens if values is None else int(np.isnan(values).sum())
    if column is not None and lacking:
        return f"{lacking} of its {forest.trainable_tokens} trainable tokens have no value in column {column}"
    return None


def pack(sizes: Sequence[int], budget: int, *, padded: bool = False) -> list[list[int]]:
    """Return indices into ``sizes``, grouped so that no group's sum exceeds ``budget``; deterministic.

    ``padded`` limits the number of a group's sizes times its largest instead. First-fit decreasing: at most
    11/9 of the optimal number of groups, plus one. Indices within a group are sorted. Raises ConfigError for
    a size above the budget.
    """
    groups: list[list[int]] = []
    loads: list[int] = []
    for index in _decreasing(sizes):
        size = sizes[index]
        if size > budget:
            raise ConfigError(
                f"a sequence of {size} tokens is longer than a micro-batch of --max_tokens {budget}",
                hint=f"raise --max_tokens to {size} or more, or lower --max_prompt_tokens when sampling",
            )
        # Take a group's first size as its largest: they come in decreasing order.
        needed = (sizes[group[0]] if padded else size for group in groups)
        fitting = next((g for g, more in enumerate(needed) if loads[g] + more <= budget), None)
        if fitting is None:
            groups.append([])
            loads.append(0)
            fitting = len(groups) - 1
        groups[fitting].append(index)
        loads[fitting] += sizes[groups[fitting][0]] if padded else size
    return [sorted(group) for group in groups]


def balance(sizes: Sequence[int], budget: int, ranks: int, *, padded: bool = False) -> list[list[int]]:
    """Pack for ``ranks`` ranks: group g belongs to rank g % ranks; returns a multiple of ``ranks`` groups.

    The groups of one round are close in size, and so are the sums of the ranks. Groups may be empty if there
    are fewer sizes than ranks. ``padded``: see ``pack``.
    """
    groups = pack(sizes, budget, padded=padded)
    if ranks == 1:
        return groups
    count = -(-len(groups) // ranks) * ranks
    spread = _spread_padded(sizes, budget, count) if padded else _spread(sizes, count)
    # Keep the packing otherwise: groups of even sums may exceed a budget that the packing meets.
    if all(_load(sizes, group, padded=padded) <= budget for group in spread):
        groups = spread
    groups += [[] for _ in range(count - len(groups))]
    groups.sort(key=lambda group: -_load(sizes, group, padded=padded))
    rounds = enumerate(batches(groups, ranks))
    # Turn every other round: the first rank would otherwise get the largest of each.
    return [group for number, round_ in rounds for group in round_[:: -1 if number % 2 else 1]]


def _load(sizes: Sequence[int], group: Sequence[int], *, padded: bool) -> int:
    found = [sizes[index] for index in group]
    return len(found) * max(found, default=0) if padded else sum(found)


def _spread(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return ``count`` groups of nearly equal sums: each size, largest first, goes to the smallest group."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in _decreasing(sizes):
        smallest = loads.index(min(loads))
        groups[smallest].append(index)
        loads[smallest] += sizes[index]
    return [sorted(group) for group in groups]


def _spread_padded(sizes: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Return at most ``count`` groups of similar sizes, packed for the lowest budget that needs no more."""
    budgets = range(max(sizes, default=budget), budget)
    index = bisect.bisect_left(budgets, -count, key=lambda each: -len(pack(sizes, each, padded=True)))
    return pack(sizes, budgets[index] if index < len(budgets) else budget, padded=True)


def _decreasing(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))


def _micro_batch(parts: Sequence[TokenForest], merging: PrefixMerging) -> TokenForest:
    # Run one token: other ranks have a micro-batch in this round, and their collectives wait.
    if not parts:
        return forest_from_sequences([[0]], [[False]])
    forest = join(parts)
    return merge_prefixes(forest) if merging == "group" and len(parts) > 1 else forest
