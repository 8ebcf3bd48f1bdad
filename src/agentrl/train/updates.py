"""Several optimizer updates on one step's data: how the data are split, and what the step reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.documents.training import DBRecordData

_COUNTED = ("tokens", "trainable_tokens", "trajectories")


def split_updates(data: Sequence[DBRecordData], parts: int) -> list[list[DBRecordData]]:
    """At most ``parts`` mini-batches of whole groups, their trainable tokens balanced; none is empty.

    A group stays together, so that what its trajectories share is still computed once. The same data give
    the same mini-batches.
    """
    groups: dict[str, list[DBRecordData]] = {}
    for item in data:
        groups.setdefault(item.task, []).append(item)
    sizes = {task: sum(item.trainable_tokens for item in items) for task, items in groups.items()}
    order = {task: place for place, task in enumerate(groups)}
    chosen: list[list[str]] = [[] for _ in range(min(parts, len(groups)))]
    for task in sorted(groups, key=lambda task: (-sizes[task], order[task])):
        min(chosen, key=lambda tasks: sum(sizes[name] for name in tasks)).append(task)
    return [[item for task in sorted(tasks, key=order.__getitem__) for item in groups[task]]
            for tasks in chosen]  # fmt: skip


def join_metrics(updates: Sequence[Mapping[str, Any]], first_pass: int) -> dict[str, Any]:
    """What a step of several updates reports; ``first_pass`` of them make one pass over its data.

    Tokens and trajectories are counted once, seconds add up, maxima are over all updates, and every other
    number is their mean, each update counting with its trainable tokens. Histograms are of the first pass.
    """
    weights = [float(update["trainable_tokens"]) for update in updates]
    joined: dict[str, Any] = {}
    for name, value in updates[0].items():
        found = [(update[name], weight) for update, weight in zip(updates, weights, strict=True)
                 if name in update]  # fmt: skip
        if isinstance(value, Mapping):
            join = _mean_of if name.endswith("_fractions") else _sum_of
            joined[name] = join(found[:first_pass])
        elif name in _COUNTED:
            joined[name] = sum(number for number, _ in found[:first_pass])
        elif name.startswith("seconds_"):
            joined[name] = sum(number for number, _ in found)
        elif name.endswith("_max"):
            joined[name] = max(number for number, _ in found)
        elif isinstance(value, int | float):
            total = sum(weight for _, weight in found)
            joined[name] = sum(number * weight for number, weight in found) / total
        else:
            joined[name] = value
    return joined


def _sum_of(found: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    keys = sorted({key for counts, _ in found for key in counts}, key=int)
    return {key: sum(counts.get(key, 0.0) for counts, _ in found) for key in keys}


def _mean_of(found: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    total = sum(weight for _, weight in found)
    keys = sorted({key for shares, _ in found for key in shares}, key=int)
    return {key: sum(shares.get(key, 0.0) * weight for shares, weight in found) / total for key in keys}
