"""Which ready groups a step may train, and what their older tokens weigh: pure decisions on versions."""

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
VersionField = Literal["min_version", "max_version"]
Place = tuple[int, ...]
"""Of a Task among the groups of a run, in the order in which they are begun: its number, epoch and order."""


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
    """``--staleness_policy``: what becomes of tokens more than ``max_staleness`` versions old.

    ``drop``: a group that holds such a token is stale as a whole. ``mask``: such tokens are not trained, and
    data that hold no others are stale. ``decay``: nothing is stale; the advantage of such a token is
    multiplied by exp(−``decay``) for every version beyond ``max_staleness``, as ``--out_of_date_decay``
    narrows a token's bounds by the same factor for every version of its age.
    """

    max_staleness: int
    policy: StalenessPolicy = "drop"
    decay: float | None = None

    def __post_init__(self) -> None:
        if self.policy == "decay" and self.decay is None:
            raise ConfigError(
                "--staleness_policy decay is given without the rate at which old tokens lose weight",
                cure="give it, e.g. --out_of_date_decay 0.5; or choose drop or mask",
            )

    def oldest(self, version: int) -> int:
        """The lowest policy version that counts as fresh in a step that starts from ``version``."""
        return max(0, version - self.max_staleness)

    def limit(self, version: int) -> tuple[VersionField, int]:
        """Data whose first is below the second are stale: ``min_version`` or ``max_version``, and a bound."""
        if self.policy == "decay":
            return "max_version", 0
        return ("min_version" if self.policy == "drop" else "max_version"), self.oldest(version)

    def weigh(self, data: DBRecordData, version: int) -> DBRecordData:
        """``data`` as a step that starts from ``version`` trains them; the same object if no token is old."""
        oldest = self.oldest(version)
        if self.policy == "drop" or all(span.version >= oldest for span in data.spans):
            return data
        return _masked(data, oldest) if self.policy == "mask" else self._decayed(data, oldest)

    def _decayed(self, data: DBRecordData, oldest: int) -> DBRecordData:
        rate = self.decay or 0.0
        weights = (math.exp(-rate * max(0, oldest - span.version)) for span in data.spans)
        spans = (
            replace(span, advantage=span.advantage * weight)
            for span, weight in zip(data.spans, weights, strict=True)
        )
        return replace(data, spans=tuple(spans))


def _masked(data: DBRecordData, oldest: int) -> DBRecordData:
    """``data`` whose spans older than ``oldest`` are context: in no loss and in no denominator."""
    ends = np.cumsum([span.end - span.start for span in data.spans])[:-1]
    logprobs = np.split(unpack_floats(data.behavior_logprobs), ends)
    kept = [(span, part) for span, part in zip(data.spans, logprobs, strict=True) if span.version >= oldest]
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
