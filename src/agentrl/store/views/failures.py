"""Count what failed, by kind: attempts at trajectories, and groups that could not be finalized."""

from __future__ import annotations

from agentrl.documents.status import RecordStatus, TaskStatus
from agentrl.scoring.groups import FAILED
from agentrl.store.connection import Json, Repository, database_call
from agentrl.store.names import RECORD, TASK
from agentrl.store.views.rows import FailureCount


class Failures(Repository):
    """The counts behind ``agentrl status``, ``agentrl audit run`` and the dashboard. It never writes."""

    @database_call
    async def attempts(self, newest: int | None = None) -> list[FailureCount]:
        """Count failed attempts by kind, the most frequent first; ``newest`` limits it to the last ones."""
        stages: list[Json] = [
            {"$match": {"status": RecordStatus.FAILED.value}},
            {"$sort": {"created_at": -1}},
            *([{"$limit": newest}] if newest is not None else []),
            {"$project": {"failure": 1}},
            {
                "$group": {
                    "_id": "$failure.kind",
                    "count": {"$sum": 1},
                    "message": {"$first": "$failure.message"},
                    "record": {"$first": "$_id"},
                }
            },
            {"$sort": {"count": -1, "_id": 1}},
        ]
        cursor = await self._collection(RECORD).aggregate(stages)
        return [
            FailureCount(
                kind=group["_id"] or "unknown",
                count=group["count"],
                message=group["message"] or "",
                record=group["record"],
            )
            for group in await cursor.to_list()
        ]

    @database_call
    async def groups(self) -> list[FailureCount]:
        """Count the groups that could not be finalized, as one row of kind ``group``; empty without one."""
        stages: list[Json] = [
            # any split: the index begins with it
            {"$match": {"split": {"$gte": ""}, "status": TaskStatus.COMPLETED.value}},
            {"$match": {"group.outcome": FAILED}},
            {"$group": {"_id": None, "count": {"$sum": 1}, "message": {"$last": "$group.problem"}}},
        ]
        cursor = await self._collection(TASK).aggregate(stages)
        return [
            FailureCount(kind="group", count=group["count"], message=group["message"] or "")
            for group in await cursor.to_list()
        ]
