"""Records: one attempt at one trajectory, moved along its states by the sampler that holds the claim."""

from __future__ import annotations

from typing import Any

from pymongo import ASCENDING, DESCENDING
from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import plain
from agentrl.documents.record import Record
from agentrl.documents.status import RECORD_EDGES, RecordStatus, sources
from agentrl.documents.task import Claim
from agentrl.errors import StoreError
from agentrl.store import slots
from agentrl.store.claims import lease_lost
from agentrl.store.connection import Json, Part, database_call
from agentrl.store.names import RECORD, TASK


class Records(Part):
    """The calls on Records that need no transaction; scoring and failing are ``Claims``'."""

    @database_call
    async def create(self, claim: Claim) -> Record:
        """Insert the Record of a claim; calling it again returns what is stored."""
        task = claim.task
        record = Record(
            id=claim.record_id, task=task.id, traj_id=claim.traj_id, attempt=claim.attempt,
            split=task.split, epoch=task.epoch, query=task.query, answer=task.answer, owner=claim.owner,
        )  # fmt: skip
        try:
            await self._collection(RECORD).insert_one(record.to_document())
        except DuplicateKeyError:
            stored = await self._collection(RECORD).find_one({"_id": record.id})
            if stored is None or stored["owner"] != claim.owner:
                raise lease_lost(claim) from None
            return Record.from_document(stored)
        return record

    @database_call
    async def advance(self, claim: Claim, status: RecordStatus, /, **fields: Any) -> None:
        """Move the Record to ``status`` and set ``fields``; in ``status`` already, only set them.

        Raises LeaseLostError when the claim no longer holds, StoreError when no edge leads there.
        """
        if await self._collection(TASK).find_one(slots.held(claim), {"_id": 1}) is None:
            raise lease_lost(claim)
        allowed = [*sources(RECORD_EDGES, status), status.value]
        changes = {"$set": {"status": status.value, **plain(fields)}}
        query = {"_id": claim.record_id, "owner": claim.owner, "status": {"$in": allowed}}
        result = await self._collection(RECORD).update_one(query, changes)
        if result.matched_count:
            return
        stored = await self._collection(RECORD).find_one({"_id": claim.record_id}, {"status": 1})
        if stored is None or stored["status"] == RecordStatus.FAILED.value:
            raise lease_lost(claim)
        raise StoreError(f"Record {claim.record_id} is {stored['status']} and cannot become {status.value}")

    @database_call
    async def get(self, record_id: str) -> Record | None:
        """The Record with this ``_id``."""
        document = await self._collection(RECORD).find_one({"_id": record_id})
        return None if document is None else Record.from_document(document)

    @database_call
    async def of_task(self, task_id: str) -> list[Record]:
        """Every attempt at every trajectory of a Task, by trajectory and attempt."""
        cursor = self._collection(RECORD).find(
            {"task": task_id}, sort=[("traj_id", ASCENDING), ("attempt", ASCENDING)]
        )
        return [Record.from_document(document) async for document in cursor]

    @database_call
    async def find(
        self, *, split: str | None = None, status: RecordStatus | None = None, limit: int = 50
    ) -> list[Record]:
        """The newest Records in a state."""
        query: Json = {}
        if split is not None:
            query["split"] = split
        if status is not None:
            query["status"] = status.value
        cursor = self._collection(RECORD).find(query, sort=[("created_at", DESCENDING)], limit=limit)
        return [Record.from_document(document) async for document in cursor]

    @database_call
    async def counts(self, split: str) -> dict[RecordStatus, int]:
        """How many Records are in each state; every state is a key."""
        counts = dict.fromkeys(RecordStatus, 0)
        pipeline: list[Json] = [
            {"$match": {"split": split}},
            {"$group": {"_id": "$status", "count": {"$sum": 1}}},
        ]
        async for group in await self._collection(RECORD).aggregate(pipeline):
            counts[RecordStatus(group["_id"])] = group["count"]
        return counts
