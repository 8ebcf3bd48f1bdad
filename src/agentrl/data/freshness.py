"""Choose the groups of a step, and drop, mask or decay their old tokens: pure functions of ages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from agentrl.documents.packing import pack_floats, unpack_floats
from agentrl.documents.training import DBRecordData
from agentrl.errors import ConfigError

StalenessPolicy = Literal["drop", "decay", "mask"]
Place = tuple[int, ...]
"""Sort key of a Task: the order in which groups are begun (number, epoch, order)."""


class GroupMember(Protocol):
    """What choosing needs to know of one DBRecordData."""

    @property
    def id(self) -> str:
        """Its ``_id``."""

    @property
    def task(self) -> str:
        """The Task that is its group."""

    @property
    def trained_count(self) -> int:
        """How often it has been trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """``--staleness_policy``: what becomes of tokens that are more than ``max_staleness`` steps old.

    The age of a token is the number of optimizer steps between the weights that sampled it and those that
    train it. ``drop``: a group that holds an older token is stale as a whole. ``mask``: such tokens are not
    trained, and data that hold no others are stale. ``decay``: nothing is stale; the advantage of such a
    token is multiplied by exp(−``decay``) for every step beyond ``max_staleness``, as ``--out_of_date_decay``
    narrows a token's bounds by the same factor for every step of its age.
    """

    max_staleness: int
    policy: StalenessPolicy = "drop"
    decay: float | None = None

    def __post_init__(self) -> None:
        if self.policy == "decay" and self.decay is None:
            raise ConfigError(
                "--staleness_policy decay is given without the rate at which old tokens lose weight",
                hint="give it, e.g. --out_of_date_decay 0.5; or choose drop or mask",
            )

    @property
    def stale_spans(self) -> Literal["any", "all"] | None:
        """Whether data are stale when any span is too old, or when all are; None: never."""
        stale: dict[StalenessPolicy, Literal["any", "all"]] = {"drop": "any", "mask": "all"}
        return stale.get(self.policy)

    def oldest(self, step: int) -> int:
        """Return the earliest step whose tokens are fresh for weights after ``step`` steps."""
        return max(0, step - self.max_staleness)

    def weigh(self, data: DBRecordData, ages: Mapping[int, int]) -> DBRecordData:
        """Return ``data`` with old tokens masked or decayed; the same object if no token is old."""
        beyond = [max(0, ages[span.version] - self.max_staleness) for span in data.spans]
        if self.policy == "drop" or not any(beyond):
            return data
        return _masked(data, beyond) if self.policy == "mask" else self._decayed(data, beyond)

    def _decayed(self, data: DBRecordData, beyond: Sequence[int]) -> DBRecordData:
        rate = self.decay or 0.0
        spans = (
            replace(span, advantage=span.advantage * math.exp(-rate * steps))
            for span, steps in zip(data.spans, beyond, strict=True)
        )
        return replace(data, spans=tuple(spans))


def _masked(data: DBRecordData, beyond: Sequence[int]) -> DBRecordData:
    """Turn spans that are too old into context: they are in no loss and in no denominator."""
    ends = np.cumsum([span.end - span.start for span in data.spans])[:-1]
    logprobs = np.split(unpack_floats(data.behavior_logprobs), ends)
    spans = zip(data.spans, logprobs, beyond, strict=True)
    kept = [(span, part) for span, part, steps in spans if steps == 0]
    return replace(
        data,
        spans=tuple(span for span, _ in kept),
        trainable_tokens=sum(span.end - span.start for span, _ in kept),
        behavior_logprobs=pack_floats(np.concatenate([part for _, part in kept]) if kept else []),
    )


def choose_groups(
    members: Sequence[GroupMember],
    count: int,
    places: Mapping[str, Place] | None = None,
    avoid: Collection[str] = (),
) -> dict[str, list[str]]:
    """At most ``count`` whole groups as {task: [data id, …]}, in the order in which they were begun.

    A group that took long goes before those that were begun after it and are ready sooner; one that has been
    trained (``max_trained_count``) behind those that have not. Groups without a place in ``places`` come
    behind the others, in their order in ``members``; so do, behind all, groups that hold an id of ``avoid``.
    A group's ids are sorted: a choice among the same groups is always the same.
    """
    groups: dict[str, list[str]] = {}
    trained: dict[str, int] = {}
    for member in members:
        groups.setdefault(member.task, []).append(member.id)
        trained[member.task] = max(member.trained_count, trained.get(member.task, 0))
    known = places or {}
    last = (math.inf,)

    def rank(task: str) -> tuple[bool, int, tuple[float, ...]]:
        return any(id in avoid for id in groups[task]), trained[task], known.get(task, last)

    return {task: sorted(groups[task]) for task in sorted(groups, key=rank)[:count]}
