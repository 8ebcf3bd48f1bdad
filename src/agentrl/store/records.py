"""Records: one attempt at one trajectory, moved along its states by the sampler that holds the claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import ASCENDING, DESCENDING, UpdateOne
from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import plain
from agentrl.documents.record import Record
from agentrl.documents.status import RECORD_EDGES, RecordStatus, sources
from agentrl.documents.task import Claim
from agentrl.errors import StoreError
from agentrl.store.attempts import new_record
from agentrl.store.connection import Connection, Json, Repository, database_call
from agentrl.store.names import RECORD
from agentrl.store.slots import lease_lost, lost_claims
from agentrl.store.write_coalescer import WriteCoalescer

_PASSED_ON = (RecordStatus.FAILED, RecordStatus.RELEASED)
"""States of a Record whose slot is no longer its owner's."""


@dataclass(frozen=True, slots=True)
class _Advance:
    """A move of the claim's Record to ``status``, with ``fields`` to be set."""

    claim: Claim
    status: RecordStatus
    fields: Json

    @property
    def update(self) -> UpdateOne:
        """The move, if the claim holds and an edge leads there: who takes a slot over fails its Record."""
        allowed = [*sources(RECORD_EDGES, self.status), self.status.value]
        query = {"_id": self.claim.record_id, "owner": self.claim.owner, "status": {"$in": allowed}}
        update: Json = {"$set": {"status": self.status.value, **self.fields}}
        if self.status is RecordStatus.COMPLETED:
            update["$currentDate"] = {"completed_at": True}
        return UpdateOne(query, update)


class Records(Repository):
    """The calls on Records that need no transaction; scoring and failing are ``Claims``'.

    What several trajectories do at the same time shares a round trip.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._creating = WriteCoalescer(self._create_batch, self._create)
        self._advancing = WriteCoalescer(self._advance_batch, self._advance)

    @database_call
    async def create(self, claim: Claim) -> Record:
        """Insert the Record of a claim; calling it again returns what is stored.

        Raises LeaseLostError when the slot has passed on.
        """
        return await self._creating.write(claim)

    @database_call
    async def advance(self, claim: Claim, status: RecordStatus, /, **fields: Any) -> None:
        """Move the Record to ``status`` and set ``fields``; in ``status`` already, only set them.

        Raises LeaseLostError when the claim no longer holds, StoreError when no edge leads there.
        """
        await self._advancing.write(_Advance(claim, status, plain(fields)))

    @database_call
    async def get(self, record_id: str) -> Record | None:
        """The Record with this ``_id``."""
        document = await self._collection(RECORD).find_one({"_id": record_id})
        return None if document is None else Record.from_document(document)

    @database_call
    async def by_task(self, task_id: str) -> list[Record]:
        """Every attempt at every trajectory of a Task, by trajectory and attempt."""
        cursor = self._collection(RECORD).find(
            {"task": task_id}, sort=[("traj_id", ASCENDING), ("attempt", ASCENDING)]
        )
        return [Record.from_document(document) async for document in cursor]

    @database_call
    async def failures(self, task_id: str, traj_id: int | None = None) -> list[Record]:
        """The failed attempts of a Task, or of one of its slots, in order: why it failed, each time."""
        query: Json = {"task": task_id, "status": RecordStatus.FAILED.value}
        if traj_id is not None:
            query["traj_id"] = traj_id
        cursor = self._collection(RECORD).find(query, sort=[("traj_id", ASCENDING), ("attempt", ASCENDING)])
        return [Record.from_document(document) async for document in cursor]

    @database_call
    async def failure_summary(self, split: str) -> list[tuple[str, int, str]]:
        """Return why Records gave no training data: (kind of failure or "abandoned", count, first reason)."""
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
        """The newest Records in a state."""
        query: Json = {}
        if split is not None:
            query["split"] = split
        if status is not None:
            query["status"] = status.value
        cursor = self._collection(RECORD).find(query, sort=[("created_at", DESCENDING)], limit=limit)
        return [Record.from_document(document) async for document in cursor]

    @database_call
    async def scored(self, split: str, min_score: float) -> list[Record]:
        """The scored Records with ``min_score`` or more whose model calls are kept, by id."""
        query: Json = {"split": split, "score": {"$gte": min_score}, "pruned_at": None}
        cursor = self._collection(RECORD).find(query, sort=[("_id", ASCENDING)])
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

    async def _create(self, claim: Claim) -> Record:
        record = new_record(claim)
        try:
            await self._collection(RECORD).insert_one(record.to_document())
        except DuplicateKeyError:
            stored = await self.get(record.id)
            if stored is None or stored.owner != claim.owner or stored.status in _PASSED_ON:
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
        passed_on = stored is None or stored.owner != claim.owner or stored.status in _PASSED_ON
        if stored is None or passed_on or await lost_claims(self._connection, [claim]):
            raise lease_lost(claim)
        raise StoreError(f"Record {claim.record_id} is {stored.status} and cannot become {status}")

    async def _advance_batch(self, advances: Sequence[_Advance]) -> Sequence[None] | None:
        if await lost_claims(self._connection, [each.claim for each in advances]):
            return None
        updates = [each.update for each in advances]
        result = await self._collection(RECORD).bulk_write(updates, ordered=False)
        return [None] * len(updates) if result.matched_count == len(updates) else None
