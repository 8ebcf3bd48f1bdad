"""Which trajectories share a micro-batch: first-fit decreasing under a token budget."""

from __future__ import annotations

from collections.abc import Sequence

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
        if size > budget:
            raise ConfigError(
                f"a trajectory of {size} tokens is longer than a micro-batch of --max_tokens {budget}",
                cure=f"raise --max_tokens to {size} or more, or lower --max_prompt_tokens when sampling",
            )
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
