"""Groups: from a Task all of whose slots are terminal to training data, exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pymongo import ASCENDING, ReturnDocument, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.base import plain
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import RECORD_EDGES, RecordStatus, SlotStatus, TaskStatus, sources
from agentrl.documents.task import Begin, Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import GroupError, StoreError
from agentrl.scoring.groups import FAILED, summarize
from agentrl.store import slots
from agentrl.store.blobs import Blobs
from agentrl.store.connection import Connection, Json, Repository, database_call
from agentrl.store.model_calls import read_calls
from agentrl.store.names import DATA, RECORD, TASK
from agentrl.store.selection import ease_after_group

DECIDE_SECONDS = 120.0
"""Time limit of deciding one group: a user's filter may hang."""

_LONGEST_DOUBLING = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOutcome:
    """What becomes of one scored Record: READY with an advantage, or ABANDONED because of something."""

    record_id: str
    status: RecordStatus
    advantage: float | None = None
    because: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What becomes of a group. ``summary`` is stored as ``Task.group`` with ``finalised_at`` added."""

    data: tuple[DBRecordData, ...] = ()
    records: tuple[RecordOutcome, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A Task, its Records and their model calls."""

    task: Task
    records: tuple[Record, ...]
    calls: Mapping[str, list[DispatchedSamplingTask]]


Decide = Callable[[Task, list[Record], Mapping[str, list[DispatchedSamplingTask]]], GroupOutcome]
"""Pure: (task, its Records of every attempt, calls by Record id) → outcome. It may run more than once."""


class Groups(Repository):
    """The calls on groups: a Task, its Records and the data made from them."""

    @database_call
    async def waiting_groups(self, split: str, limit: int = 16, waiting_seconds: float = 0.0) -> list[str]:
        """``_id`` of Tasks that have been complete, but not finalized, for ``waiting_seconds``, in order.

        A group whose last attempt failed is left out until ``finalising.retry_at``.
        """
        since = {"$lte": ["$updated_at", slots.after(-waiting_seconds)]}
        due = {"$lte": ["$finalising.retry_at", "$$NOW"]}  # no value is less than any
        query: Json = {"split": split, "status": TaskStatus.WAITING.value, "$expr": {"$and": [since, due]}}
        cursor = self._collection(TASK).find(
            query, {"_id": 1}, sort=[("epoch", ASCENDING), ("order", ASCENDING)], limit=limit
        )
        return [document["_id"] async for document in cursor]

    @database_call
    async def stored_group(self, task_id: str) -> StoredGroup | None:
        """Read a group with its model calls; None where there is no such Task."""
        document = await self._collection(TASK).find_one({"_id": task_id})
        return None if document is None else await self._read_group(document)

    @database_call
    async def finalize_group(self, task_id: str, decide: Decide) -> bool:
        """Move a WAITING Task to COMPLETED with everything that follows from it, in one transaction.

        Returns False if the group is not waiting or someone else finalized it first. What ``decide``
        raises leaves the group as it was.
        """
        document = await self._collection(TASK).find_one({"_id": task_id, "status": TaskStatus.WAITING.value})
        if document is None:
            return False
        group = await self._read_group(document)
        live = _live(group.task)
        if any(record.id in live and record.status is not RecordStatus.SCORED for record in group.records):
            return False  # someone finalized the group between the two reads
        if (problem := slot_problem(group.task, group.records)) is not None:
            raise StoreError(problem, hint="agentrl db check lists what contradicts what")
        outcome = await _decided(group, decide)
        blobs = Blobs(self._connection, DATA)
        data = [await blobs.offload(item.to_document()) for item in outcome.data]
        unchanged = {
            "_id": task_id, "status": TaskStatus.WAITING.value, "updated_at": document["updated_at"],
        }  # fmt: skip

        async def write(session: AsyncClientSession) -> bool:
            completed = await self._collection(TASK).update_one(
                unchanged, _complete(outcome.summary, group.task.begun), session=session
            )
            if completed.matched_count == 0:
                return False
            if data:
                await self._collection(DATA).insert_many(data, session=session)
            await settle_records(self._connection, outcome.records, session)
            return True

        return await self._connection.transaction(write)

    @database_call
    async def count_failed_attempt(self, task_id: str, problem: str, *, retry_seconds: float) -> int:
        """Count a failed attempt at finalizing a WAITING group; returns the count, or 0 if it is not waiting.

        The next one is due after ``retry_seconds``, doubled with each attempt.
        """
        attempts = {"$add": [{"$ifNull": ["$finalising.attempts", 0]}, 1]}
        doublings = {"$min": ["$finalising.attempts", _LONGEST_DOUBLING]}
        wait_ms = {"$toLong": {"$multiply": [retry_seconds * 500, {"$pow": [2, doublings]}]}}
        task = await self._collection(TASK).find_one_and_update(
            {"_id": task_id, "status": TaskStatus.WAITING.value},
            [
                {"$set": {"finalising.attempts": attempts, "finalising.problem": slots.literal(problem)}},
                {"$set": {"finalising.retry_at": slots.after(wait_ms)}},
            ],
            {"finalising": 1},
            return_document=ReturnDocument.AFTER,
        )
        return 0 if task is None else int(task["finalising"]["attempts"])

    @database_call
    async def give_up_group(self, task_id: str, problem: str, rules: Mapping[str, Any]) -> bool:
        """Complete a WAITING group that cannot be finalized, with the outcome ``failed``.

        Its scored Records are ABANDONED because of ``problem``, and it has no training data. ``rules`` are
        for ``agentrl db rescore``. Returns False if the group is not waiting.
        """

        async def write(session: AsyncClientSession) -> bool:
            task = await self._collection(TASK).find_one(
                {"_id": task_id, "status": TaskStatus.WAITING.value}, session=session
            )
            if task is None:
                return False
            records = await read_records(self._connection, task_id, session)
            scored = [record for record in records if record.score is not None]
            failed = sum(slot["status"] == SlotStatus.FAILED for slot in task["slots"])
            decided = {"outcome": FAILED, "problem": problem, "rules": rules}
            summary = {**summarize(scored, failed, 0, rules), **decided}
            await self._collection(TASK).update_one({"_id": task_id}, _complete(summary), session=session)
            because = f"the group could not be finalized: {problem}"
            await self._collection(RECORD).update_many(
                {"task": task_id, "status": RecordStatus.SCORED.value},
                {"$set": {"status": RecordStatus.ABANDONED.value, "abandoned_because": because}},
                session=session,
            )
            return True

        return await self._connection.transaction(write)

    @database_call
    async def uncounted_groups(self, split: str) -> list[dict[str, Any]]:
        """``Task.group``, and ``task``, of every finalized group that no step has counted, oldest first.

        A step counts groups as it commits (``commit_step``), so that none is missed and none counts twice.
        """
        query: Json = {
            "split": split, "status": TaskStatus.COMPLETED.value, "group.counted_at_step": None,
        }  # fmt: skip
        cursor = self._collection(TASK).find(query, {"group": 1}, sort=[("group.finalised_at", ASCENDING)])
        return [{"task": document["_id"], **document["group"]} async for document in cursor]

    async def _read_group(self, document: Json) -> StoredGroup:
        task = Task.from_document(document)
        cursor = self._collection(RECORD).find({"task": task.id}, sort=[("traj_id", 1), ("attempt", 1)])
        records = tuple([Record.from_document(record) async for record in cursor])
        calls = await read_calls(self._connection, sorted(_live(task)), readable=False)
        return StoredGroup(task=task, records=records, calls=calls)


async def read_records(
    connection: Connection, task_id: str, session: AsyncClientSession | None = None
) -> list[Record]:
    """Return every attempt at every trajectory of a Task, by trajectory and attempt."""
    cursor = connection.collection(RECORD).find(
        {"task": task_id}, sort=[("traj_id", ASCENDING), ("attempt", ASCENDING)], session=session
    )
    return [Record.from_document(document) async for document in cursor]


async def settle_records(
    connection: Connection, outcomes: Sequence[RecordOutcome], session: AsyncClientSession
) -> None:
    """Move scored Records to READY or ABANDONED. Raises StoreError if one of them is not scored."""
    updates = [
        UpdateOne(
            {"_id": outcome.record_id, "status": {"$in": sources(RECORD_EDGES, outcome.status)}},
            {
                "$set": {
                    "status": outcome.status.value, "advantage": outcome.advantage,
                    "abandoned_because": outcome.because,
                }
            },
        )
        for outcome in outcomes
    ]  # fmt: skip
    if not updates:
        return
    result = await connection.collection(RECORD).bulk_write(updates, session=session)
    if result.matched_count != len(updates):
        raise StoreError(
            f"{len(updates) - result.matched_count} of {len(updates)} Records of the group were not"
            " scored, and only scored ones can be settled"
        )


def slot_problem(task: Task, records: Sequence[Record]) -> str | None:
    """Say where a score is not that of the attempt which holds its slot; None where every score is."""
    slots_by_number = {slot.traj_id: slot for slot in task.slots}
    scored = {record.id for record in records if record.score is not None}
    for record in records:
        slot = slots_by_number.get(record.traj_id)
        if record.score is None:
            continue
        if slot is None or slot.status is not SlotStatus.SCORED or slot.record_id != record.id:
            return f"Record {record.id} has a score, and its slot is not scored by it"
        if slot.score != record.score:
            return f"Record {record.id} has the score {record.score}, and its slot {slot.score}"
    missing = sorted(_live(task) - scored)
    return f"Record {missing[0]} has no score, and its slot has" if missing else None


async def _decided(group: StoredGroup, decide: Decide) -> GroupOutcome:
    """Run ``decide`` in a thread. Raises GroupError after ``DECIDE_SECONDS``; the thread goes on."""
    try:
        async with asyncio.timeout(DECIDE_SECONDS):
            return await asyncio.to_thread(decide, group.task, list(group.records), group.calls)
    except TimeoutError as error:
        raise GroupError(
            f"the decision on group {group.task.id} took longer than {DECIDE_SECONDS:g} s",
            hint="see that the --group_filter returns; it must not wait for anything",
        ) from error


def _live(task: Task) -> set[str]:
    """The Records of the attempts that scored the slots of a Task."""
    return {str(slot.record_id) for slot in task.slots if slot.status is SlotStatus.SCORED}


def _complete(summary: dict[str, Any], begun: Begin | None = None) -> list[Json]:
    """``begun``: the task may be selected again, by its ease."""
    selectable = {} if begun is None else {"ease": ease_after_group(begun, summary)}
    return [
        {
            "$set": {
                "status": TaskStatus.COMPLETED.value,
                "updated_at": "$$NOW",
                "group": slots.literal(plain(summary)),
                "finalising": None,
                **selectable,
            }
        },
        {"$set": {"group.finalised_at": "$$NOW", "group.counted_at_step": None}},
    ]
