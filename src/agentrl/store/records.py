"""Create, advance, end and find Records, one per attempt; ``Attempts`` changes them with their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import ASCENDING, DESCENDING, UpdateOne
from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import plain
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.record import Failure, Record
from agentrl.documents.status import RECORD_EDGES, SAMPLED, RecordStatus, sources, values
from agentrl.documents.task import Claim
from agentrl.errors import StoreError
from agentrl.store.mechanics.blobs import seal
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.mechanics.slots import lease_lost, lost_claims
from agentrl.store.mechanics.write_coalescer import WriteCoalescer
from agentrl.store.names import MODEL_CALL, RECORD

_LOST = (RecordStatus.FAILED, RecordStatus.RELEASED)
"""Statuses of a Record whose owner has lost the slot."""
_UNFINISHED = values((RecordStatus.CREATED, RecordStatus.RUNNING, *SAMPLED))


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


@dataclass(frozen=True, slots=True)
class RecordOrigin:
    """What made the score of a Record, and its context."""

    scorer: str | None
    tools: tuple[str, ...]
    """The names of the tools that it called."""


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
    async def keep(self, claim: Claim, /, **fields: Any) -> None:
        """Set ``fields`` of the running Record of a claim. Raises LeaseLostError if the claim is lost."""
        result = await self._collection(RECORD).update_one(running_record(claim), {"$set": plain(fields)})
        if result.matched_count == 0:
            raise lease_lost(claim)

    @database_call
    async def latest_partial(self, claim: Claim) -> PartialGeneration | None:
        """Return the unfinished model call of the previous attempt, if that attempt was released."""
        previous = await self._collection(RECORD).find_one(
            {
                "task": claim.task.id, "traj_id": claim.traj_id, "attempt": claim.attempt - 1,
                "status": RecordStatus.RELEASED.value,
            },
            {"partial": 1},
        )  # fmt: skip
        stored = None if previous is None else previous.get("partial")
        return None if stored is None else PartialGeneration.from_document(stored)

    @database_call
    async def get(self, record_id: str) -> Record | None:
        """Return the Record with this ``_id``; None if it does not exist."""
        return await self._one(Record, RECORD, {"_id": record_id})

    @database_call
    async def by_task(self, task_id: str) -> list[Record]:
        """Return every attempt at every trajectory of a Task, by trajectory and attempt."""
        return await read_records(self._connection, task_id)

    @database_call
    async def failure_summary(self, split: str) -> list[tuple[str, int, str]]:
        """Return (kind of failure or "abandoned", count, first reason) of Records without training data."""
        because = {"$ifNull": ["$failure.message", "$abandoned_because"]}
        states = [RecordStatus.FAILED.value, RecordStatus.ABANDONED.value]
        groups = await self._aggregate(
            RECORD,
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
        )
        return [(group["_id"], group["count"], group["first"] or "") for group in groups]

    @database_call
    async def scored(self, split: str, min_score: float) -> list[Record]:
        """Return the unpruned Records with a score of ``min_score`` or more, by id."""
        query: Json = {"split": split, "score": {"$gte": min_score}, "pruned_at": None}
        return await self._all(Record, RECORD, query, sort=[("_id", ASCENDING)])

    @database_call
    async def origins(self, record_ids: Sequence[str]) -> dict[str, RecordOrigin]:
        """Return {id: scorer and tools} of the Records with these ids."""
        query: Json = {"_id": {"$in": list(record_ids)}}
        scorers = {
            document["_id"]: (document.get("score_details") or {}).get("scorer")
            async for document in self._collection(RECORD).find(query, {"score_details.scorer": 1})
        }
        called = await self._aggregate(
            MODEL_CALL,
            {"$match": {"record": query["_id"], "tool_executions.0": {"$exists": True}}},
            {"$unwind": "$tool_executions"},
            {"$group": {"_id": "$record", "tools": {"$addToSet": "$tool_executions.name"}}},
        )
        tools = {group["_id"]: tuple(sorted(group["tools"])) for group in called}
        return {key: RecordOrigin(scorer, tools.get(key, ())) for key, scorer in scorers.items()}

    @database_call
    async def trace_ids(self, record_ids: Sequence[str], limit: int) -> list[str]:
        """Return the traces of up to ``limit`` of these Records that were traced."""
        query = {"_id": {"$in": list(record_ids)}, "trace_id": {"$ne": None}}
        cursor = self._collection(RECORD).find(query, {"trace_id": 1}, sort=[("_id", 1)], limit=limit)
        return [document["trace_id"] async for document in cursor]

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


async def read_records(connection: Connection, task_id: str) -> list[Record]:
    """Return every attempt at every trajectory of a Task, by trajectory and attempt."""
    cursor = connection.collection(RECORD).find(
        {"task": task_id}, sort=[("traj_id", ASCENDING), ("attempt", ASCENDING)]
    )
    return [Record.from_document(document) async for document in cursor]


def new_record(claim: Claim) -> Record:
    """Return the Record of a claim in its first state."""
    task = claim.task
    return Record(
        id=claim.record_id, task=task.id, traj_id=claim.traj_id, attempt=claim.attempt,
        split=task.split, epoch=task.epoch, query=task.query, answer=task.answer, owner=claim.owner,
        trace_id=claim.trace_id,
    )  # fmt: skip


def running_record(claim: Claim) -> Json:
    """Return a filter for the claim's Record; it matches only while model calls may be added."""
    return {"_id": claim.record_id, "owner": claim.owner, "status": RecordStatus.RUNNING.value}


async def queue_sampled(connection: Connection, claims: Sequence[Claim]) -> frozenset[str]:
    """Return the ids of the sampled Records of ``claims``; those that were being scored wait for it again.

    Nobody owns them then: a former owner that checked its claim before this cannot say that it scores them.
    """
    records = connection.collection(RECORD)
    sampled: Json = {
        "_id": {"$in": [claim.record_id for claim in claims]},
        "status": {"$in": values(SAMPLED)},
    }
    ids = [record["_id"] async for record in records.find(sampled, {"_id": 1})]
    if ids:
        queued = {"status": RecordStatus.COMPLETED.value, "owner": None}
        await records.update_many({"_id": {"$in": ids}}, {"$set": queued})
    return frozenset(ids)


async def end_records(connection: Connection, claims: Sequence[Claim], failure: Failure | None) -> None:
    """End the Records of ``claims``: FAILED because of ``failure``, RELEASED if it is None.

    Call it in the transaction that changes the slots. An attempt that has no Record yet gets one, so that
    every attempt is recorded and a late owner cannot insert the Record afterwards.
    """
    if not claims:
        return
    status = RecordStatus.RELEASED if failure is None else RecordStatus.FAILED
    changes = {"status": status.value, "failure": plain(failure)}
    records = connection.collection(RECORD)
    ids = [claim.record_id for claim in claims]
    ended = await records.update_many(
        {"_id": {"$in": ids}, "status": {"$in": _UNFINISHED}}, {"$set": changes}
    )
    if ended.matched_count == len(claims):
        return
    cursor = records.find({"_id": {"$in": ids}}, {"_id": 1})
    stored = {record["_id"] for record in await cursor.to_list()}
    missing = [claim for claim in claims if claim.record_id not in stored]
    if missing:
        await records.insert_many([new_record(claim).to_document() | changes for claim in missing])
