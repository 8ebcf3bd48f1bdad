"""Create, advance and find Records, one per attempt; ``attempts`` scores, fails and releases them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import ASCENDING, DESCENDING, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import plain
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.record import HarnessRun, Record
from agentrl.documents.status import RECORD_EDGES, RecordStatus, sources
from agentrl.documents.task import Claim
from agentrl.errors import StoreError
from agentrl.store.attempts import new_record
from agentrl.store.mechanics.blobs import seal
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.mechanics.slots import lease_lost, lost_claims
from agentrl.store.mechanics.write_coalescer import WriteCoalescer
from agentrl.store.names import RECORD

_LOST = (RecordStatus.FAILED, RecordStatus.RELEASED)
"""Statuses of a Record whose owner has lost the slot."""


@dataclass(frozen=True, slots=True)
class _Advance:
    """A change of the claim's Record to ``status`` that also sets ``fields``."""

    claim: Claim
    status: RecordStatus
    fields: Json

    @property
    def update(self) -> UpdateOne:
        """Return the update; it matches only if the claim owns the Record and the transition is allowed."""
        allowed = [*sources(RECORD_EDGES, self.status), self.status.value]
        query = {"_id": self.claim.record_id, "owner": self.claim.owner, "status": {"$in": allowed}}
        update: Json = {"$set": {"status": self.status.value, **self.fields}}
        if self.status is RecordStatus.COMPLETED:
            update["$set"] |= seal(RECORD, "sampled", new_record(self.claim).to_document() | self.fields)
            update["$currentDate"] = {"completed_at": True}
        return UpdateOne(query, update)


class Records(Repository):
    """The calls on Records that need no transaction. Concurrent calls of one kind share a round trip."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._creating = WriteCoalescer(self._create_batch, self._create)
        self._advancing = WriteCoalescer(self._advance_batch, self._advance)

    @database_call
    async def create(self, claim: Claim) -> Record:
        """Insert the Record of a claim and return it; return the stored Record if it exists.

        Raises LeaseLostError if the slot has another owner.
        """
        return await self._creating.write(claim)

    @database_call
    async def advance(self, claim: Claim, status: RecordStatus, /, **fields: Any) -> None:
        """Change the Record to ``status`` and set ``fields``. Idempotent.

        Raises LeaseLostError if the claim is lost, StoreError if the transition is not allowed.
        """
        await self._advancing.write(_Advance(claim, status, plain(fields)))

    @database_call
    async def keep_partial(self, claim: Claim, partial: PartialGeneration) -> None:
        """Store the tokens of an unfinished model call in the Record of a claim, if it is still held."""
        query = {
            "_id": claim.record_id, "owner": claim.owner, "status": RecordStatus.RUNNING.value,
        }  # fmt: skip
        await self._collection(RECORD).update_one(query, {"$set": {"partial": partial.to_document()}})

    @database_call
    async def keep_harness(self, claim: Claim, run: HarnessRun) -> None:
        """Store what the harness of a claim did before its attempt failed, if the claim is still held."""
        query = {
            "_id": claim.record_id, "owner": claim.owner, "status": RecordStatus.RUNNING.value,
        }  # fmt: skip
        await self._collection(RECORD).update_one(query, {"$set": {"harness": run.to_document()}})

    @database_call
    async def latest_partial(self, claim: Claim) -> PartialGeneration | None:
        """Return the unfinished model call of the previous attempt, if that attempt was released."""
        found = await self._collection(RECORD).find_one(
            {
                "task": claim.task.id, "traj_id": claim.traj_id, "attempt": claim.attempt - 1,
                "status": RecordStatus.RELEASED.value,
            },
            {"partial": 1},
        )  # fmt: skip
        stored = None if found is None else found.get("partial")
        return None if stored is None else PartialGeneration.from_document(stored)

    @database_call
    async def get(self, record_id: str) -> Record | None:
        """Return the Record with this ``_id``; None if it does not exist."""
        document = await self._collection(RECORD).find_one({"_id": record_id})
        return None if document is None else Record.from_document(document)

    @database_call
    async def by_task(self, task_id: str) -> list[Record]:
        """Return every attempt at every trajectory of a Task, by trajectory and attempt."""
        return await read_records(self._connection, task_id)

    @database_call
    async def failures(self, task_id: str, traj_id: int | None = None) -> list[Record]:
        """Return the failed attempts at a Task, or at one of its slots, in order."""
        query: Json = {"task": task_id, "status": RecordStatus.FAILED.value}
        if traj_id is not None:
            query["traj_id"] = traj_id
        cursor = self._collection(RECORD).find(query, sort=[("traj_id", ASCENDING), ("attempt", ASCENDING)])
        return [Record.from_document(document) async for document in cursor]

    @database_call
    async def failure_summary(self, split: str) -> list[tuple[str, int, str]]:
        """Return (kind of failure or "abandoned", count, first reason) of Records without training data."""
        because = {"$ifNull": ["$failure.message", "$abandoned_because"]}
        states = [RecordStatus.FAILED.value, RecordStatus.ABANDONED.value]
        pipeline: list[Json] = [
            {"$match": {"split": split, "status": {"$in": states}}},
            {"$sort": {"created_at": ASCENDING}},
            {
                "$group": {
                    "_id": {"$ifNull": ["$failure.kind", "abandoned"]},
                    "count": {"$sum": 1},
                    "first": {"$first": because},
                }
            },
            {"$sort": {"count": DESCENDING, "_id": ASCENDING}},
        ]
        cursor = await self._collection(RECORD).aggregate(pipeline)
        return [(group["_id"], group["count"], group["first"] or "") async for group in cursor]

    @database_call
    async def find(
        self, *, split: str | None = None, status: RecordStatus | None = None, limit: int = 50
    ) -> list[Record]:
        """Return the newest Records, optionally of one split or status."""
        query: Json = {}
        if split is not None:
            query["split"] = split
        if status is not None:
            query["status"] = status.value
        cursor = self._collection(RECORD).find(query, sort=[("created_at", DESCENDING)], limit=limit)
        return [Record.from_document(document) async for document in cursor]

    @database_call
    async def scored(self, split: str, min_score: float) -> list[Record]:
        """Return the unpruned Records with a score of ``min_score`` or more, by id."""
        query: Json = {"split": split, "score": {"$gte": min_score}, "pruned_at": None}
        cursor = self._collection(RECORD).find(query, sort=[("_id", ASCENDING)])
        return [Record.from_document(document) async for document in cursor]

    @database_call
    async def trace_ids(self, record_ids: Sequence[str], limit: int) -> list[str]:
        """Return the traces of up to ``limit`` of these Records that were traced."""
        query = {"_id": {"$in": list(record_ids)}, "trace_id": {"$ne": None}}
        cursor = self._collection(RECORD).find(query, {"trace_id": 1}, sort=[("_id", 1)], limit=limit)
        return [document["trace_id"] async for document in cursor]

    @database_call
    async def counts(self, split: str) -> dict[RecordStatus, int]:
        """Return the number of Records per status; every status is a key."""
        counts = dict.fromkeys(RecordStatus, 0)
        pipeline: list[Json] = [
            {"$match": {"split": split}},
            {"$group": {"_id": "$status", "count": {"$sum": 1}}},
        ]
        async for group in await self._collection(RECORD).aggregate(pipeline):
            counts[RecordStatus(group["_id"])] = group["count"]
        return counts

    async def _create(self, claim: Claim) -> Record:
        record = new_record(claim)
        try:
            await self._collection(RECORD).insert_one(record.to_document())
        except DuplicateKeyError:
            stored = await self.get(record.id)
            if stored is None or stored.owner != claim.owner or stored.status in _LOST:
                raise lease_lost(claim) from None
            return stored
        return record

    async def _create_batch(self, claims: Sequence[Claim]) -> list[Record]:
        records = [new_record(claim) for claim in claims]
        documents = [record.to_document() for record in records]
        await self._collection(RECORD).insert_many(documents, ordered=False)
        return records

    async def _advance(self, advance: _Advance) -> None:
        if await self._advance_batch([advance]) is not None:
            return
        claim, status = advance.claim, advance.status
        stored = await self.get(claim.record_id)
        is_lost = stored is None or stored.owner != claim.owner or stored.status in _LOST
        if stored is None or is_lost or await lost_claims(self._connection, [claim]):
            raise lease_lost(claim)
        raise StoreError(f"Record {claim.record_id} is {stored.status} and cannot become {status}")

    async def _advance_batch(self, advances: Sequence[_Advance]) -> Sequence[None] | None:
        if await lost_claims(self._connection, [each.claim for each in advances]):
            return None
        updates = [each.update for each in advances]
        result = await self._collection(RECORD).bulk_write(updates, ordered=False)
        return [None] * len(updates) if result.matched_count == len(updates) else None


async def read_records(
    connection: Connection, task_id: str, session: AsyncClientSession | None = None
) -> list[Record]:
    """Return every attempt at every trajectory of a Task, by trajectory and attempt."""
    cursor = connection.collection(RECORD).find(
        {"task": task_id}, sort=[("traj_id", ASCENDING), ("attempt", ASCENDING)], session=session
    )
    return [Record.from_document(document) async for document in cursor]
