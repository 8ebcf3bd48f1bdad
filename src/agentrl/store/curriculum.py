"""Find the level of difficulty of a curriculum (``--task_selection curriculum``) from finalized groups."""

from __future__ import annotations

from statistics import fmean

from pymongo import DESCENDING
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.status import TaskStatus
from agentrl.store.connection import Repository
from agentrl.store.names import TASK

LEVEL = "meta.level"
"""The field of a task with its level, a number; the lowest level is the easiest."""

MASTERED_RATE = 0.8
"""Mean pass rate of recent groups of a level from which on the next level begins."""

MASTERED_GROUPS = 8
"""Number of recently finalized groups of a level that decide; fewer never do."""


class Curriculum(Repository):
    """Reads the level from stored results, so every sampler finds the same, also after a restart."""

    async def level(self, split: str, session: AsyncClientSession | None) -> float | None:
        """Return the lowest level with tasks that are not begun and that is not mastered.

        If all are mastered, the highest such level; None if no such task has a level.
        """
        waiting = {"split": split, "status": TaskStatus.CREATED.value, LEVEL: {"$type": "number"}}
        levels = sorted(await self._collection(TASK).distinct(LEVEL, waiting, session=session))
        for level in levels:
            if not await self._is_mastered(split, level, session):
                return float(level)
        return float(levels[-1]) if levels else None

    async def _is_mastered(self, split: str, level: float, session: AsyncClientSession | None) -> bool:
        recent = self._collection(TASK).find(
            {"split": split, LEVEL: level, "group.finalised_at": {"$ne": None}, "group.scored": {"$gt": 0}},
            {"group.pass_rate": 1}, sort=[("group.finalised_at", DESCENDING)], limit=MASTERED_GROUPS,
            session=session,
        )  # fmt: skip
        rates = [task["group"].get("pass_rate") or 0.0 async for task in recent]
        return len(rates) == MASTERED_GROUPS and fmean(rates) >= MASTERED_RATE
