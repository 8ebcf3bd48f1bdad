"""Count the finished training groups and their abandoned trajectories, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from agentrl.data.finalize_group import TRAIN_SPLIT
from agentrl.documents.status import TaskStatus
from agentrl.observe.tables import fixed, table
from agentrl.store.selection import ORDER

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True, kw_only=True)
class GroupCount:
    """Finalized groups of the train split that were begun by order, or by their tasks' pass rate."""

    by: str
    groups: int
    abandoned_groups: int
    """Groups without a trained trajectory."""
    trajectories: int
    """With a score."""
    trained: int
    """Trajectories that became training data."""
    pass_rate: float | None
    """Mean over the groups."""


async def count_groups(store: Store) -> list[GroupCount]:
    """Return one count for groups begun by order and one for those begun by pass rate."""
    abandoned = {"$cond": [{"$eq": ["$group.trained", 0]}, 1, 0]}
    pipeline: list[dict[str, Any]] = [
        {"$match": {"split": TRAIN_SPLIT, "status": TaskStatus.COMPLETED.value}},
        {
            "$group": {
                "_id": {"$ifNull": ["$begun.by", ORDER]},
                "groups": {"$sum": 1},
                "abandoned_groups": {"$sum": abandoned},
                "trajectories": {"$sum": "$group.scored"},
                "trained": {"$sum": "$group.trained"},
                "pass_rate": {"$avg": "$group.pass_rate"},
            }
        },
        {"$sort": {"_id": 1}},
    ]
    cursor = await store.database["Task"].aggregate(pipeline)
    return [GroupCount(by=group.pop("_id"), **group) async for group in cursor]


def group_table(counts: Sequence[GroupCount]) -> RenderableType:
    """Return the counts as a table, a row each."""
    rows = [
        [
            item.by,
            item.groups,
            item.abandoned_groups,
            fixed(item.abandoned_groups / item.groups, 2),
            item.trajectories,
            item.trajectories - item.trained,
            fixed((item.trajectories - item.trained) / item.trajectories if item.trajectories else None, 2),
            fixed(item.pass_rate, 2),
        ]
        for item in counts
    ]
    columns = ["begun by", "groups", "abandoned", "share", "trajectories", "abandoned", "share", "pass rate"]
    return table("Training groups", columns, rows)
