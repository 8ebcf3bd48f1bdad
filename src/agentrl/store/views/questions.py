"""Read the tasks of a run over its epochs: how often they are solved, and whether their groups agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.documents.status import TaskStatus
from agentrl.documents.task import task_key
from agentrl.store.connection import Json, Repository, database_call
from agentrl.store.names import TASK
from agentrl.store.views.aggregation import excerpt


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One task over the epochs in which its group is completed, without its text."""

    task_id: str
    last: str
    """``_id`` of the Task of its last epoch."""
    means: tuple[float | None, ...]
    """Mean score of each epoch, in order; None for a group without a score."""
    groups: int
    scored: int
    failed: int
    mixed: int
    """Groups whose scores differ; only these can be trained."""
    lowest: float | None
    highest: float | None

    @property
    def mean(self) -> float | None:
        """The mean over the epochs; None without a score."""
        known = self.known
        return sum(known) / len(known) if known else None

    @property
    def known(self) -> list[float]:
        """The means of the epochs with a score."""
        return [value for value in self.means if value is not None]

    @property
    def change(self) -> float | None:
        """The mean of the last epoch minus that of the first; None without two epochs."""
        known = self.known
        return known[-1] - known[0] if len(known) > 1 else None

    @property
    def kind(self) -> str:
        """``always agrees``, ``never agrees``, ``sometimes agrees``, or ``no scores``."""
        if not self.known:
            return "no scores"
        if self.mixed == 0:
            return "always agrees"
        return "never agrees" if self.mixed == len(self.known) else "sometimes agrees"


class Questions(Repository):
    """The reads behind the page of tasks. It never writes."""

    @database_call
    async def all(self, split: str) -> list[Question]:
        """Return every task of a split with a completed group, ordered by id."""
        scores = {"$filter": {"input": "$slots.score", "cond": {"$ne": ["$$this", None]}}}
        cursor = await self._collection(TASK).aggregate(
            [
                {"$match": {"split": split, "status": TaskStatus.COMPLETED.value}},
                {
                    "$project": {
                        "task_id": 1,
                        "epoch": 1,
                        "mean": {"$avg": scores},
                        "low": {"$min": scores},
                        "high": {"$max": scores},
                        "scored": {"$size": scores},
                        "slots": {"$size": "$slots"},
                    }
                },
                {
                    "$group": {
                        "_id": "$task_id",
                        "epochs": {"$push": {"epoch": "$epoch", "mean": "$mean"}},
                        "groups": {"$sum": 1},
                        "scored": {"$sum": "$scored"},
                        "slots": {"$sum": "$slots"},
                        "mixed": {"$sum": {"$cond": [{"$gt": ["$high", "$low"]}, 1, 0]}},
                        "low": {"$min": "$low"},
                        "high": {"$max": "$high"},
                    }
                },
                {"$sort": {"_id": 1}},
            ]
        )
        return [_question(split, row) for row in await cursor.to_list()]

    @database_call
    async def texts(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the first 300 characters of the question of each Task."""
        cursor = await self._collection(TASK).aggregate(
            [
                {"$match": {"_id": {"$in": list(keys)}}},
                {"$project": {"query": excerpt("query", 300)}},
            ]
        )
        return {row["_id"]: row["query"] for row in await cursor.to_list()}


def _question(split: str, row: Json) -> Question:
    epochs = sorted(row["epochs"], key=lambda item: item["epoch"])
    return Question(
        task_id=row["_id"],
        last=task_key(split, epochs[-1]["epoch"], row["_id"]),
        means=tuple(item["mean"] for item in epochs),
        groups=row["groups"],
        scored=row["scored"],
        failed=row["slots"] - row["scored"],
        mixed=row["mixed"],
        lowest=row["low"],
        highest=row["high"],
    )
