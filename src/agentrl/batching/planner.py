"""Which trajectories share a micro-batch, under a token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.batching.forest import TokenForest, forest_from_data
from agentrl.batching.sharing import common_prefix, share_prefixes
from agentrl.documents.packing import unpack_ids
from agentrl.documents.training import DBRecordData
from agentrl.errors import ConfigError


def pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into ``sizes``, grouped so that no group's sum exceeds ``budget``; deterministic.

    First-fit decreasing: at most 11/9 of the optimal number of groups, plus one. Within a group, indices are
    in their given order. A size above the budget is a ConfigError.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
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


def plan_micro_batches(data: Sequence[DBRecordData], max_tokens: int) -> list[list[DBRecordData]]:
    """Split one step's trajectories into micro-batches of at most ``max_tokens`` tokens.

    A trajectory is whole in its micro-batch. Raises ConfigError for one that does not fit.
    """
    groups = pack([item.tokens for item in data], max_tokens)
    return [[data[index] for index in group] for group in groups]


def plan_shared(data: Sequence[DBRecordData], max_tokens: int) -> list[list[DBRecordData]]:
    """Like ``plan_micro_batches``, for micro-batches whose equal prefixes are kept once (``share_prefixes``).

    Trajectories are taken in the order of their ids, so that those with a common prompt are neighbours, and
    each counts with the tokens that it adds to the one before it. Raises ConfigError for one too long.
    """
    openings = [unpack_ids(item.input_ids)[: item.nodes[0].end].astype(np.int64) for item in data]
    batches: list[list[DBRecordData]] = []
    room, before = 0, np.zeros(0, np.int64)
    for index in sorted(range(len(data)), key=lambda i: openings[i].tolist()):
        item, opening = data[index], openings[index]
        _require_fits(item.tokens, max_tokens)
        added = item.tokens - common_prefix(opening, before)
        if not batches or added > room:
            batches.append([])
            room, added = max_tokens, item.tokens
        batches[-1].append(item)
        room -= added
        before = opening
    return batches


def build_micro_batches(
    data: Sequence[DBRecordData], max_tokens: int, *, vocab_size: int, share: bool = True
) -> list[TokenForest]:
    """One optimizer step's micro-batches of at most ``max_tokens`` tokens each, prefixes shared or not.

    Raises ConfigError for a trajectory above ``max_tokens``, ForestError for data that are no forest.
    """
    if share:
        batches = plan_shared(data, max_tokens)
        return [share_prefixes(forest_from_data(batch, vocab_size=vocab_size)) for batch in batches]
    batches = plan_micro_batches(data, max_tokens)
    return [forest_from_data(batch, vocab_size=vocab_size) for batch in batches]


def _require_fits(size: int, budget: int) -> None:
    if size > budget:
        raise ConfigError(
            f"a trajectory of {size} tokens is longer than a micro-batch of --max_tokens {budget}",
            cure=f"raise --max_tokens to {size} or more, or lower --max_prompt_tokens when sampling",
        )
