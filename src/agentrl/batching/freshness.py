"""Which ready groups a step may train: pure decisions on versions and metadata."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class GroupMember(Protocol):
    """What choosing needs to know of one DBRecordData."""

    @property
    def id(self) -> str:
        """Its ``_id``."""

    @property
    def task(self) -> str:
        """The Task that is its group."""


def oldest_fresh(version: int, max_staleness: int) -> int:
    """The lowest policy version whose tokens a step may train that starts from ``version``."""
    return max(0, version - max_staleness)


def choose_groups(
    members: Sequence[GroupMember], count: int, avoid: Collection[str] = ()
) -> dict[str, list[str]]:
    """At most ``count`` whole groups as {task: [data id, …]}, in the order of their first members.

    Groups that hold an id of ``avoid`` come last: they are taken only where others do not suffice.
    """
    groups: dict[str, list[str]] = {}
    for member in members:
        groups.setdefault(member.task, []).append(member.id)
    ranked = sorted(groups.items(), key=lambda item: any(id in avoid for id in item[1]))
    return dict(ranked[:count])
