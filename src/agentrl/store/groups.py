"""Finalize groups: turn the scored Records of a complete Task into training data, exactly once.

A group may wait for the columns of its Records: values that another process fills in before training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from pymongo import ASCENDING, DESCENDING, ReturnDocument, UpdateOne

from agentrl.documents.document import plain
from agentrl.documents.model_call import DispatchedSamplingTask, pack_floats
from agentrl.documents.record import Column, Record, TopLogprobs, column_key
from agentrl.documents.status import (
    RECORD_EDGES,
    ColumnStatus,
    RecordStatus,
    SlotStatus,
    TaskStatus,
    VersionStatus,
    sources,
    values,
)
from agentrl.documents.task import Begin, Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import LeaseLostError, StoreError
from agentrl.scoring.groups import FAILED, Decision, summarize
from agentrl.store.claims import GroupAdmission
from agentrl.store.epochs import BY_ORDER, ease_after_group
from agentrl.store.mechanics.blobs import Blobs
from agentrl.store.mechanics.connection import (
    COLUMN,
    DATA,
    RECORD,
    TASK,
    VERSION,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.mechanics.lease import FREE, DocumentLease, after, after_backoff, expired, literal
from agentrl.store.model_calls import read_model_calls
from agentrl.store.records import read_records

_WINDOW = 1024
"""Trajectories that a mean over many groups reads at most."""
_UNSAMPLED = values((RecordStatus.CREATED, RecordStatus.RUNNING, RecordStatus.RELEASED))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """The result of finalizing a group. ``summary`` is stored as ``Task.group``, plus ``finalized_at``."""

    data: tuple[DBRecordData, ...] = ()
    records: tuple[Decision, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A Task, the Records of all attempts, and the model calls and columns of each Record by its ``_id``."""

    task: Task
    records: Sequence[Record]
    calls: Mapping[str, Sequence[DispatchedSamplingTask]] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Column]] = field(default_factory=dict)


class Groups(Repository):
    """The calls on groups: a Task, its Records and their training data."""

    @database_call
    async def waiting(
        self, split: str, limit: int = 16, waiting_seconds: float = 0.0, *, epoch: int | None = None
    ) -> list[str]:
        """Return the ids of Tasks that have waited ``waiting_seconds`` to be finalized, in order.

        Without ``epoch``, of all epochs. Excludes a group until ``finalizing.retry_at`` after an attempt that
        failed, and one that waits for a column.
        """
        since = {"$lte": ["$updated_at", after(-waiting_seconds)]}
        due = {"$lte": ["$finalizing.retry_at", "$$NOW"]}  # a missing value is less than any date
        query: Json = {"split": split, "status": TaskStatus.WAITING.value, "$expr": {"$and": [since, due]}}
        if epoch is not None:
            query["epoch"] = epoch
        # Exclude them in the query: they stay WAITING, and ``limit`` of them would hide all groups behind.
        if unfilled := await tasks_with_unfilled(self._connection, split):
            query["_id"] = {"$nin": list(unfilled)}
        return await self._ids(TASK, query, sort=BY_ORDER, limit=limit)

    @database_call
    async def stored(self, task_id: str) -> StoredGroup | None:
        """Return a group with its model calls; None if the Task does not exist."""
        return await self._stored({"_id": task_id})

    async def _stored(self, query: Json) -> StoredGroup | None:
        task = await self._one(Task, TASK, query)
        if task is None:
            return None
        return await read_group(self._connection, task, await read_records(self._connection, task.id))

    @database_call
    async def count_open(self, split: str) -> int:
        """Return how many groups are open; see ``GroupAdmission``, which limits this number."""
        return await GroupAdmission(self._connection).count(split)

    @database_call
    async def oldest_version(self, split: str) -> int | None:
        """Return the oldest policy version of a token of groups that are begun and not finalized, if any.

        A trajectory whose first model call is not stored yet counts as of the versions of its beginning.
        """
        begun = {"split": split, "status": {"$in": [TaskStatus.RUNNING.value, TaskStatus.WAITING.value]}}
        tasks = {"task": {"$in": await self._ids(TASK, begun)}}
        found = await self._aggregate(
            RECORD,
            {"$match": {**tasks, "min_version": {"$gte": 0}}},
            {"$group": {"_id": None, "oldest": {"$min": "$min_version"}}},
        )
        oldest = [int(group["oldest"]) for group in found]
        unstored = {**tasks, "status": {"$in": _UNSAMPLED}, "min_version": None}
        first = await self._collection(RECORD).find_one(unstored, {"created_at": 1}, sort=[("created_at", 1)])
        if first is not None:
            # Take two: an engine may have served the one before the newest.
            served = await self._collection(VERSION).find(
                {"status": VersionStatus.PUBLISHED.value, "published_at": {"$lte": first["created_at"]}},
                {"_id": 1}, sort=[("_id", DESCENDING)], limit=2,
            ).to_list()  # fmt: skip
            oldest += [int(version["_id"]) for version in served]
        return min(oldest, default=None)

    @database_call
    async def mean_score(self, split: str, since_version: int) -> float | None:
        """Return the mean score of the newest trajectories sampled by ``since_version`` and later ones alone.

        At most ``_WINDOW`` count; None without any.
        """
        sampled = {"split": split, "min_version": {"$gte": since_version}, "score": {"$ne": None}}
        found = await self._aggregate(
            RECORD,
            {"$match": sampled},
            {"$sort": {"min_version": DESCENDING}},
            {"$limit": _WINDOW},
            {"$group": {"_id": None, "mean": {"$avg": "$score"}}},
        )
        return next((float(group["mean"]) for group in found), None)

    @database_call
    async def to_decide(self, task_id: str, columns: Sequence[str] = ()) -> StoredGroup | None:
        """Return a WAITING group with all that its decision needs; None if there is none, or none yet.

        A group waits for the ``columns`` of its scored Records; those that they lack are opened. Raises
        StoreError if Records and slots contradict each other.
        """
        group = await self._stored({"_id": task_id, "status": TaskStatus.WAITING.value})
        if group is None:
            return None
        live = _scored_record_ids(group.task)
        if any(record.id in live and record.status is not RecordStatus.SCORED for record in group.records):
            return None  # another process finalized the group between the two reads
        if (problem := slot_problem(group.task, group.records)) is not None:
            raise StoreError(problem, hint="list all inconsistencies: agentrl db check")
        wanted = {column_key(record, name) for record in live for name in columns}
        stored = {column.id: column for each in group.columns.values() for column in each}
        if wanted - stored.keys():
            await open_columns(self._connection, group.task, columns, sorted(live))
            return None
        return None if any(stored[key].status in UNFILLED for key in wanted) else group

    @database_call
    async def finalize(self, group: StoredGroup, outcome: GroupOutcome) -> bool:
        """Complete the Task of a decided group and write its data and Records, in one transaction.

        Returns False, and writes nothing, if another process finalized the group first or it was reopened.
        """
        blobs = Blobs(self._connection, DATA)
        # Upload before the transaction: a conflict repeats it, and the server ends one that lasts long.
        data = [await blobs.offload(item.to_document()) for item in outcome.data]
        task = group.task

        async def write() -> bool:
            # Compare the time too: a group reopened and completed since the read is WAITING again.
            completed = await self._collection(TASK).update_one(
                {"_id": task.id, "status": TaskStatus.WAITING.value, "updated_at": task.updated_at},
                _complete(outcome.summary, task.begun),
            )
            if completed.matched_count == 0:
                return False
            if data:
                await self._collection(DATA).insert_many(data)
            await settle_records(self._connection, outcome.records)
            return True

        return await self._connection.transaction(write)

    @database_call
    async def count_failed_attempt(self, task_id: str, problem: str, *, retry_seconds: float) -> int:
        """Count a failed attempt to finalize a WAITING group; return the count, or 0 if it is not waiting.

        The next attempt is due after ``retry_seconds``, doubled with each attempt.
        """
        attempts = {"$add": [{"$ifNull": ["$finalizing.attempts", 0]}, 1]}
        # Take half of ``retry_seconds``: ``attempts`` counts this one already, which doubles the wait.
        retry_at = after_backoff(retry_seconds / 2, "$finalizing.attempts", jitter=0.0)
        task = await self._collection(TASK).find_one_and_update(
            {"_id": task_id, "status": TaskStatus.WAITING.value},
            [
                {"$set": {"finalizing.attempts": attempts, "finalizing.problem": literal(problem)}},
                {"$set": {"finalizing.retry_at": retry_at}},
            ],
            {"finalizing": 1},
            return_document=ReturnDocument.AFTER,
        )
        return 0 if task is None else int(task["finalizing"]["attempts"])

    @database_call
    async def give_up(self, task_id: str, problem: str, rules: Mapping[str, Any]) -> bool:
        """Complete a WAITING group that cannot be finalized, with the outcome ``failed``.

        Its scored Records become ABANDONED because of ``problem``, and it gets no training data. ``rules``
        are stored for ``agentrl db rescore``. Returns False if the group is not waiting.
        """

        async def write() -> bool:
            task = await self._collection(TASK).find_one({"_id": task_id, "status": TaskStatus.WAITING.value})
            if task is None:
                return False
            records = await read_records(self._connection, task_id)
            scored = [record for record in records if record.score is not None]
            failed = sum(slot["status"] == SlotStatus.FAILED for slot in task["slots"])
            decided = {"outcome": FAILED, "problem": problem, "rules": rules}
            summary = {**summarize(scored, failed, 0, rules), **decided}
            await self._collection(TASK).update_one({"_id": task_id}, _complete(summary))
            because = f"the group could not be finalized: {problem}"
            await self._collection(RECORD).update_many(
                {"task": task_id, "status": RecordStatus.SCORED.value},
                {"$set": {"status": RecordStatus.ABANDONED.value, "abandoned_because": because}},
            )
            return True

        return await self._connection.transaction(write)

    @database_call
    async def uncounted(self, split: str) -> list[dict[str, Any]]:
        """Return ``Task.group``, ``task`` and ``source`` of the finalized groups that no step has counted.

        The oldest comes first.

        ``Steps.commit`` counts groups in its transaction, so that each group is counted exactly once.
        """
        query: Json = {
            "split": split, "status": TaskStatus.COMPLETED.value, "group.counted_at_step": None,
        }  # fmt: skip
        shown = {"group": 1, "source": 1}
        cursor = self._collection(TASK).find(query, shown, sort=[("group.finalized_at", ASCENDING)])
        return [
            {"task": document["_id"], "source": document.get("source"), **document["group"]}
            async for document in cursor
        ]


async def read_group(connection: Connection, task: Task, records: Sequence[Record]) -> StoredGroup:
    """Return the group of ``records``, with the model calls and columns of those that have a score."""
    scored = [record.id for record in records if record.score is not None]
    return StoredGroup(
        task=task,
        records=records,
        # Leave long texts in GridFS: what decides a group reads scores and tokens, no text of a call.
        calls=await read_model_calls(connection, scored, readable=False),
        columns=await read_columns(connection, scored),
    )


async def settle_records(connection: Connection, decisions: Sequence[Decision]) -> None:
    """Move scored Records to READY or ABANDONED. Raises StoreError if one of them is not scored."""
    updates = [
        UpdateOne(
            {"_id": decision.record_id, "status": {"$in": sources(RECORD_EDGES, decision.status)}},
            {
                "$set": {
                    "status": decision.status.value, "advantage": decision.advantage,
                    "turn_advantages": list(decision.turn_advantages),
                    "abandoned_because": decision.abandoned_because,
                }
            },
        )
        for decision in decisions
    ]  # fmt: skip
    if not updates:
        return
    result = await connection.collection(RECORD).bulk_write(updates)
    if result.matched_count != len(updates):
        raise StoreError(
            f"{len(updates) - result.matched_count} of {len(updates)} Records of the group were not"
            " scored, and only scored Records can become ready or abandoned"
        )


def slot_problem(task: Task, records: Sequence[Record]) -> str | None:
    """Describe a Record whose score differs from its slot's; None if all scores agree."""
    slot_by_traj = {slot.traj_id: slot for slot in task.slots}
    scored = {record.id for record in records if record.score is not None}
    for record in records:
        slot = slot_by_traj.get(record.traj_id)
        if record.score is None:
            continue
        if slot is None or slot.status is not SlotStatus.SCORED or slot.record_id != record.id:
            return f"Record {record.id} has a score, and its slot is not scored by it"
        if slot.score != record.score:
            return f"Record {record.id} has the score {record.score}, and its slot {slot.score}"
    missing = sorted(_scored_record_ids(task) - scored)
    return f"Record {missing[0]} has no score, and its slot has" if missing else None


def _scored_record_ids(task: Task) -> set[str]:
    """Return the ids of the Records that scored the slots of a Task."""
    return {str(slot.record_id) for slot in task.slots if slot.status is SlotStatus.SCORED}


def _complete(summary: dict[str, Any], begun: Begin | None = None) -> list[Json]:
    """Return the update that completes a Task; with ``begun``, the task may be selected again by its ease."""
    selectable = {} if begun is None else {"ease": ease_after_group(begun, summary)}
    return [
        {
            "$set": {
                "status": TaskStatus.COMPLETED.value,
                "updated_at": "$$NOW",
                "group": literal(plain(summary)),
                "finalizing": None,
                **selectable,
            }
        },
        {"$set": {"group.finalized_at": "$$NOW", "group.counted_at_step": None}},
    ]


UNFILLED = (ColumnStatus.OPEN, ColumnStatus.RUNNING)
"""Statuses of a column that its group waits for."""
_UNFILLED = values(UNFILLED)
_RESTED = {"$lte": [{"$ifNull": ["$not_before", "$$NOW"]}, "$$NOW"]}
_CLAIMABLE: Json = {
    "$or": [
        {"$and": [{"$eq": ["$status", ColumnStatus.OPEN.value]}, _RESTED]},
        {"$and": [{"$eq": ["$status", ColumnStatus.RUNNING.value]}, expired()]},
    ]
}
"""It is open and its back-off is over, or its filler's lease has expired."""


@dataclass(frozen=True, slots=True)
class ColumnClaim:
    """The right to fill one column, until its lease expires and another filler claims it."""

    column: Column
    owner: str

    @property
    def attempt(self) -> int:
        """The number of this claim."""
        return self.column.attempt

    @property
    def record_id(self) -> str:
        """The Record whose value it is."""
        return self.column.record


class Columns(Repository):
    """The calls on columns. A write under a claim that is lost raises LeaseLostError and changes nothing."""

    @database_call
    async def claim(
        self, name: str, *, owner: str, lease_seconds: float, limit: int = 1, filler: str = ""
    ) -> list[ColumnClaim]:
        """Claim up to ``limit`` columns of a name that wait for a value, the oldest first.

        ``filler`` claims those that name it or nobody; the empty one only those that name nobody. A column
        whose lease has expired is claimed again: its filler died.
        """
        query: Json = {
            "status": {"$in": _UNFILLED}, "name": name, "filler": {"$in": sorted({"", filler})},
            "$expr": _CLAIMABLE,
        }  # fmt: skip
        oldest = [("created_at", ASCENDING), ("_id", ASCENDING)]
        fields = {"status": ColumnStatus.RUNNING.value, "not_before": None}
        claims = []
        for key in await self._ids(COLUMN, query, sort=oldest, limit=limit):
            # Take only what waits: a lease is free for its own owner, who would get what it is filling again.
            taken = await self._lease(key).take(owner, lease_seconds, fields, only_if=_CLAIMABLE)
            if taken is not None:
                claims.append(ColumnClaim(Column.from_document(taken), owner))
        return claims

    @database_call
    async def renew(self, claim: ColumnClaim, lease_seconds: float) -> None:
        """Extend the lease to ``lease_seconds`` from now, also if it has expired."""
        await self._lease(claim.column.id).renew(claim.attempt, lease_seconds)

    @database_call
    async def fill(
        self, claim: ColumnClaim, values: Sequence[float], top: TopLogprobs | None = None, *, by: str
    ) -> None:
        """Fill a column: a value for each generated token of its Record, NaN for one without.

        ``by`` says what filled it. Idempotent under one claim.
        """
        document = await Blobs(self._connection, COLUMN).offload(
            {"_id": claim.column.id, "values": pack_floats(values), "top": b"" if top is None else top.pack()}
        )
        packed = {key: value for key, value in document.items() if key != "_id"}
        filled: Json = {
            **FREE, **packed, "status": ColumnStatus.FILLED.value, "by": by, "problem": None,
        }  # fmt: skip
        await self._lease(claim.column.id).write(
            claim.attempt,
            {"$set": filled, "$currentDate": {"filled_at": True}},
            {"status": {"$in": [ColumnStatus.RUNNING.value, ColumnStatus.FILLED.value]}},
        )

    @database_call
    async def fail(
        self, claim: ColumnClaim, problem: str, *, max_attempts: int, backoff_seconds: float,
        counts: bool = True,
    ) -> ColumnStatus:  # fmt: skip
        """Hand a column back without values; return its status: OPEN, or FAILED at ``max_attempts``.

        It may be claimed again after a back-off, which doubles with each failure that counts. Without
        ``counts`` the filler was not to blame: its engine is down. A FAILED column abandons its Record.
        """
        failures = claim.column.failures + int(counts)
        status = ColumnStatus.FAILED if counts and failures >= max_attempts else ColumnStatus.OPEN
        fields = {
            **FREE, "status": status.value, "failures": failures, "problem": literal(problem),
            # Halve the back-off: ``failures`` counts this one already, which doubles the first wait.
            "not_before": after_backoff(backoff_seconds / 2, literal(failures)),
        }  # fmt: skip
        await self._lease(claim.column.id).write(
            claim.attempt, [{"$set": fields}], {"status": ColumnStatus.RUNNING.value}
        )
        return status

    @database_call
    async def release(self, claim: ColumnClaim) -> None:
        """Hand a column back at once: its filler stops."""
        fields = {**FREE, "status": ColumnStatus.OPEN.value, "not_before": None}
        await self._lease(claim.column.id).write(
            claim.attempt, {"$set": fields}, {"status": ColumnStatus.RUNNING.value}
        )

    @database_call
    async def of_owner(self, name: str, owner: str) -> list[ColumnClaim]:
        """Return the claims on columns of a name that ``owner`` holds according to the database."""
        query: Json = {"status": ColumnStatus.RUNNING.value, "name": name, "owner": owner}
        return [ColumnClaim(column, owner) for column in await self._all(Column, COLUMN, query)]

    @database_call
    async def waiting(self, name: str | None = None) -> dict[str, int]:
        """Return {filler: unfilled columns} of a name, or of all names."""
        query: Json = {"status": {"$in": _UNFILLED}, **({} if name is None else {"name": name})}
        return await self._count_by("filler", COLUMN, query)

    def _lease(self, key: str) -> DocumentLease:
        def lost(attempt: int) -> LeaseLostError:
            return LeaseLostError(
                f"claim {attempt} of column {key} expired, and another filler took it over",
                hint="nothing is lost: the other one fills it; if it happens often, raise --lease_seconds",
            )

        return DocumentLease(self._collection(COLUMN), key, lost)


async def read_columns(connection: Connection, record_ids: Sequence[str]) -> dict[str, tuple[Column, ...]]:
    """Return the columns of each Record that has any, by name, with their values."""
    blobs = Blobs(connection, COLUMN)
    query = {"record": {"$in": list(record_ids)}}
    found: dict[str, tuple[Column, ...]] = {}
    order = [("record", ASCENDING), ("name", ASCENDING)]
    async for document in connection.collection(COLUMN).find(query, sort=order):
        column = Column.from_document(await blobs.restore(document))
        found[column.record] = (*found.get(column.record, ()), column)
    return found


async def open_columns(
    connection: Connection, task: Task, names: Iterable[str], record_ids: Iterable[str]
) -> None:
    """Open the columns ``names`` of Records of ``task`` that lack them. Idempotent.

    Where ``Task.meta`` has a text under the name of a column, that filler alone fills it.
    """
    writes = []
    for name, record in product(names, record_ids):
        wanted = task.meta.get(name)
        filler = wanted if isinstance(wanted, str) else ""
        key = column_key(record, name)
        column = Column(id=key, record=record, task=task.id, split=task.split, name=name, filler=filler)
        document = {field: value for field, value in column.to_document().items() if field != "_id"}
        # Set nothing that exists: the column may have been opened, or filled, by another process.
        writes.append(UpdateOne({"_id": key}, {"$setOnInsert": document}, upsert=True))
    if writes:
        await connection.collection(COLUMN).bulk_write(writes, ordered=False)


async def tasks_with_unfilled(connection: Connection, split: str) -> Collection[str]:
    """Return the ids of the Tasks that wait for a column."""
    query = {"status": {"$in": _UNFILLED}, "split": split}
    found: list[str] = await connection.collection(COLUMN).distinct("task", query)
    return found
