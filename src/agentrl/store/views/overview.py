"""Read one run for its overview: its steps without their data, and counts from the indexes alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.documents.base import Root
from agentrl.documents.status import APPLIED_STEPS, TRAINED, DataStatus, RecordStatus, StepStatus, values
from agentrl.store.connection import Repository, database_call
from agentrl.store.names import DATA, RECORD, STEP, TASK

MAX_STEPS = 5000
"""Steps that a curve shows; of a longer run, the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint(Root):
    """One optimizer step without its data."""

    id: str
    step: int
    status: StepStatus
    policy_version: int
    trajectories: int = 0
    owner: str
    planned_at: datetime
    committed_at: datetime | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


class Overview(Repository):
    """The reads behind the overview and the curves of a run. It never writes."""

    @database_call
    async def steps(self, *, after: int = 0, last: int = MAX_STEPS) -> list[StepPoint]:
        """Return the committed steps above number ``after``, oldest first, at most the ``last`` ones."""
        cursor = await self._collection(STEP).aggregate(
            [
                {"$match": {"status": {"$in": values(APPLIED_STEPS)}, "step": {"$gt": after}}},
                {"$sort": {"step": -1}},
                {"$limit": last},
                {"$set": {"trajectories": {"$size": "$data"}}},
                {"$unset": ["data", "pending", "metrics.version_fractions", "metrics.staleness_histogram"]},
            ]
        )
        return [StepPoint.from_document(step) for step in reversed(await cursor.to_list())]

    @database_call
    async def planned(self) -> StepPoint | None:
        """Return the step that the trainer works on; None without one."""
        document = await self._collection(STEP).find_one(
            {"status": {"$in": [StepStatus.PLANNING.value, StepStatus.PLANNED.value]}},
            {"metrics": 0},
            sort=[("step", -1)],
        )
        if document is None:
            return None
        return StepPoint.from_document({**document, "trajectories": len(document["data"])})

    @database_call
    async def tasks(self) -> dict[str, dict[str, int]]:
        """Return split → status → Tasks, of all epochs."""
        return await self._counts(TASK)

    @database_call
    async def records(self) -> dict[str, dict[str, int]]:
        """Return split → status as people read it (``SHOWN_STATUSES``) → Records."""
        counts = await self._counts(RECORD)
        ready = RecordStatus.READY.value
        for split, found in counts.items():
            query = {"split": split, "status": ready, "trained_count": {"$gt": 0}}
            trained = await self._collection(RECORD).count_documents(query) if ready in found else 0
            if trained:
                found[TRAINED] = trained
                found[ready] = max(0, found[ready] - trained)
        return counts

    @database_call
    async def data(self) -> dict[str, int]:
        """Return status → training data of all splits."""
        found = await self._counts(DATA)
        total: dict[str, int] = defaultdict(int)
        for counts in found.values():
            for status, count in counts.items():
                total[status] += count
        return dict(total)

    @database_call
    async def quarantined_because(self) -> str | None:
        """Return why one of the quarantined training data must not be trained; None without one."""
        document = await self._collection(DATA).find_one(
            {"split": {"$gte": ""}, "status": DataStatus.QUARANTINED.value}, {"problem": 1}
        )
        return None if document is None else document["problem"]

    async def _counts(self, name: str) -> dict[str, dict[str, int]]:
        """Count by split and status.

        An index begins with both: the server skips through it for the distinct values, and counts its keys.
        """
        collection = self._collection(name)
        splits = await collection.distinct("split")
        statuses = await asyncio.gather(
            *(collection.distinct("status", {"split": split}) for split in splits)
        )
        pairs = [(split, status) for split, found in zip(splits, statuses, strict=True) for status in found]
        numbers = await asyncio.gather(
            *(collection.count_documents({"split": split, "status": status}) for split, status in pairs)
        )
        counts: dict[str, dict[str, int]] = defaultdict(dict)
        for (split, status), number in zip(pairs, numbers, strict=True):
            counts[split][status] = number
        return dict(counts)
