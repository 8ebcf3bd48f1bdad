"""Which tokens share a micro-batch: a step's trees, cut and packed under a budget, balanced over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from agentrl.data.forest import TokenForest, forest_from_data, forest_from_sequences
from agentrl.data.prefix_merging import merge_prefixes
from agentrl.data.split import cut, join, restrict
from agentrl.documents.training import DBRecordData
from agentrl.errors import ConfigError

PrefixMerging = Literal["off", "trajectory", "group"]


CPU_FILL = 1024
"""Tokens of a micro-batch beyond which a CPU gains no speed: its activations only leave the cache."""


def build_micro_batches(
    data: Sequence[DBRecordData],
    max_tokens: int,
    *,
    vocab_size: int,
    merging: PrefixMerging = "group",
    ranks: int = 1,
    fill: int | None = None,
    ages: Mapping[int, int] | None = None,
) -> list[TokenForest]:
    """The micro-batches of one optimizer step, each of at most ``max_tokens`` tokens.

    ``merging``: ``off`` makes every model call a sequence of its own, ``trajectory`` a tree per trajectory (a
    chain, unless its context was reset), ``group`` a tree per group; trees of one micro-batch then also share
    the context that groups have in common. A tree above ``max_tokens`` is cut at branch points, so that a
    trajectory may be spread over micro-batches and ranks (``TokenForest.holds_parts``). With ``fill``,
    micro-batches of ``off`` and ``trajectory`` grow no further than it, or than the longest tree; those of
    ``group`` do, for the more groups one holds, the more of them share their context. ``ages``: see
    ``forest_from_data``.

    The plan depends on nothing but the arguments. Rank r of ``ranks`` runs ``[r::ranks]``: all run equally
    many, with nearly the same number of tokens in each round and in all; where there is too little work for
    all of them, some are one token that trains nothing.

    Raises ConfigError, naming the trajectory, for a sequence above ``max_tokens``; ForestError for data that
    are no forest.
    """
    names = [item.id for item in data]
    trees = step_trees(data, vocab_size=vocab_size, merging=merging, ages=ages)
    limit = max_tokens if ranks == 1 else _even_limit(trees, max_tokens, ranks)
    parts = [part for tree in trees for part in cut(tree, limit, names)]
    sizes = [part.tokens for part in parts]
    if fill is not None and merging != "group":
        max_tokens = min(max_tokens, max([fill, *sizes]))
    plan = balance(sizes, max_tokens, ranks)
    return [_micro_batch([parts[index] for index in chosen], merging) for chosen in plan]


def step_trees(
    data: Sequence[DBRecordData],
    *,
    vocab_size: int,
    merging: PrefixMerging,
    ages: Mapping[int, int] | None = None,
) -> list[TokenForest]:
    """The forests that a plan packs: one for each model call, trajectory or group. Trajectory i is data[i].

    Tokens that no trainable token follows are left out, for no loss depends on them. ``ages``: see
    ``forest_from_data``.
    """
    made: list[TokenForest] = []
    groups: dict[str, list[TokenForest]] = {}
    for index, item in enumerate(data):
        tree = _numbered(forest_from_data([item], vocab_size=vocab_size, ages=ages), index)
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


def pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into ``sizes``, grouped so that no group's sum exceeds ``budget``; deterministic.

    First-fit decreasing: at most 11/9 of the optimal number of groups, plus one. Within a group, indices are
    in their given order. A size above the budget is a ConfigError.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in _decreasing(sizes):
        size = sizes[index]
        _require_fits(size, budget)
        fitting = next((group for group, left in enumerate(room) if left >= size), None)
        if fitting is None:
            groups.append([])
            room.append(budget)
            fitting = len(groups) - 1
        groups[fitting].append(index)
        room[fitting] -= size
    return [sorted(group) for group in groups]


def balance(sizes: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """``pack`` for ``ranks`` ranks: group g is rank g % ranks's; their number is a multiple of ``ranks``.

    The groups of one round are near in size, and the ranks in their sums. A group may be empty where there
    are fewer sizes than ranks.
    """
    groups = pack(sizes, budget)
    if ranks == 1:
        return groups
    count = -(-len(groups) // ranks) * ranks
    spread = _spread(sizes, count)
    if all(sum(sizes[index] for index in group) <= budget for group in spread):
        groups = spread
    else:
        groups += [[] for _ in range(count - len(groups))]
    groups.sort(key=lambda group: -sum(sizes[index] for index in group))
    rounds = [groups[start : start + ranks] for start in range(0, count, ranks)]
    return [group for place, round_ in enumerate(rounds) for group in round_[:: -1 if place % 2 else 1]]


def _spread(sizes: Sequence[int], count: int) -> list[list[int]]:
    """``count`` groups of nearly equal sums: each size, decreasing, goes to the smallest group."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in _decreasing(sizes):
        smallest = loads.index(min(loads))
        groups[smallest].append(index)
        loads[smallest] += sizes[index]
    return [sorted(group) for group in groups]


def _decreasing(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))


def _even_limit(trees: Sequence[TokenForest], max_tokens: int, ranks: int) -> int:
    """The size above which a tree is cut: a rank's even share of the step, or the longest path in it."""
    share = -(-sum(tree.tokens for tree in trees) // ranks)
    return min(max_tokens, max([share, *(tree.depth for tree in trees)]))


def _numbered(forest: TokenForest, number: int) -> TokenForest:
    """A forest of one trajectory, as trajectory ``number`` of its step."""
    return replace(
        forest,
        trajectory=np.array([number]),
        owner=np.where(forest.owner < 0, -1, number),
    )


def _micro_batch(parts: Sequence[TokenForest], merging: PrefixMerging) -> TokenForest:
    if not parts:
        return forest_from_sequences([[0]], [[False]])
    forest = join(parts)
    return merge_prefixes(forest) if merging == "group" and len(parts) > 1 else forest


def _require_fits(size: int, budget: int) -> None:
    if size > budget:
        raise ConfigError(
            f"a sequence of {size} tokens is longer than a micro-batch of --max_tokens {budget}",
            hint=f"raise --max_tokens to {size} or more, or lower --max_prompt_tokens when sampling",
        )
