"""Create, advance, score, release and end attempts: a Record and its slot change together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pymongo import ASCENDING, DESCENDING, UpdateOne
from pymongo.errors import DuplicateKeyError

from agentrl.base.batches import batches
from agentrl.documents.document import now, plain
from agentrl.documents.record import Failure, Ownership, Record, judged
from agentrl.documents.status import (
    RECORD_EDGES,
    SAMPLED,
    RecordStatus,
    SlotStatus,
    TaskStatus,
    sources,
    values,
)
from agentrl.documents.task import FEEDBACK, Claim, Task
from agentrl.errors import StoreError
from agentrl.store.mechanics import lease
from agentrl.store.mechanics.blobs import seal
from agentrl.store.mechanics.connection import (
    MODEL_CALL,
    RECORD,
    TASK,
    Connection,
    Json,
    Repository,
    WriteCoalescer,
    abort,
    database_call,
)
from agentrl.store.mechanics.lease import (
    FREE,
    QUEUED,
    after_backoff,
    lease_lost,
    literal,
    lost_claims,
    slot_status,
)

_LOST = (RecordStatus.FAILED, RecordStatus.RELEASED)
"""Statuses of a Record whose owner has lost the slot."""
_UNFINISHED = values((RecordStatus.CREATED, RecordStatus.RUNNING, *SAMPLED))
_GOES_ON = values((RecordStatus.CREATED, RecordStatus.RUNNING, RecordStatus.RELEASED))
"""Statuses of a Record that another owner may go on with."""


@dataclass(frozen=True, slots=True)
class _Advance:
    """A change of the claim's Record to ``status`` that also sets ``fields``."""

    claim: Claim
    status: RecordStatus
    fields: Json

    @property
    def update(self) -> UpdateOne:
        """Return the update; it matches only if the claim owns the Record and the transition is allowed."""
        # Allow the status itself: a server that is killed may have applied a write that it never answered.
        allowed = [*sources(RECORD_EDGES, self.status), self.status.value]
        query = {**owned_record(self.claim), "status": {"$in": allowed}}
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
        """Insert the Record of a claim and return it; a Record of earlier owners becomes the claim's.

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
    async def note(self, claim: Claim, /, **fields: Any) -> None:
        """Set ``fields`` of the claim's Ownership. Raises LeaseLostError if the claim is lost."""
        noted = {f"owners.$[own].{name}": value for name, value in plain(fields).items()}
        result = await self._collection(RECORD).update_one(
            running_record(claim), {"$set": noted}, array_filters=[{"own.attempt": claim.attempt}]
        )
        if result.matched_count == 0:
            raise lease_lost(claim)

    @database_call
    async def count_replayed(self, claim: Claim, tokens: int) -> None:
        """Count a model call of ``tokens`` that the claim's owner took over."""
        # Count at once: an owner that dies, or is cancelled, does not come to its end.
        await self._collection(RECORD).update_one(
            running_record(claim),
            {"$inc": {"owners.$[own].replayed": 1, "owners.$[own].tokens": tokens}},
            array_filters=[{"own.attempt": claim.attempt}],
        )

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
            # Read what is there: an earlier owner's, an earlier try, or what keeps a late owner out.
            await self._adopt(claim)
            stored = await self.get(record.id)
            if stored is None or stored.fence != claim.attempt or stored.status in _LOST:
                raise lease_lost(claim) from None
            return stored
        return record

    async def _adopt(self, claim: Claim) -> None:
        """Make the Record of earlier owners the claim's, unless the claim is lost."""

        async def write() -> None:
            # Write the Task, do not only read it: then the end of the claim in another process conflicts.
            held = await self._collection(TASK).update_one(
                lease.held(claim), {"$currentDate": {"updated_at": True}}
            )
            if held.matched_count:
                await adopt_records(self._connection, [claim])

        await self._connection.transaction(write)

    async def _create_batch(self, claims: Sequence[Claim]) -> list[Record] | None:
        if any(claim.first_attempt < claim.attempt for claim in claims):
            return None
        records = [new_record(claim) for claim in claims]
        documents = [record.to_document() for record in records]
        await self._collection(RECORD).insert_many(documents, ordered=False)
        return records

    async def _advance(self, advance: _Advance) -> None:
        if await self._advance_batch([advance]) is not None:
            return
        claim, status = advance.claim, advance.status
        stored = await self.get(claim.record_id)
        is_lost = stored is None or stored.fence != claim.attempt or stored.status in _LOST
        if stored is None or is_lost or await lost_claims(self._connection, [claim]):
            raise lease_lost(claim)
        raise StoreError(f"Record {claim.record_id} is {stored.status} and cannot become {status}")

    async def _advance_batch(self, advances: Sequence[_Advance]) -> Sequence[None] | None:
        # Ask for the claim once, when the Record is new: an owner may have lost its slot before it inserted
        # the Record. Whatever ends a claim later writes the Record too, so that ``update`` does not match.
        begun = [each.claim for each in advances if each.status is RecordStatus.RUNNING]
        if begun and await lost_claims(self._connection, begun):
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
        id=claim.record_id, task=task.id, traj_id=claim.traj_id, attempt=claim.first_attempt,
        split=task.split, epoch=task.epoch, query=task.query, answer=task.answer, owner=claim.owner,
        fence=claim.attempt, owners=(Ownership(owner=claim.owner, attempt=claim.attempt),),
        trace_id=claim.trace_id,
    )  # fmt: skip


def owned_record(claim: Claim) -> Json:
    """Return a filter for the claim's Record; it matches until another claim has adopted it."""
    # Ask for the fence too: a sampler may claim the same slot again, and what it began before is over.
    return {"_id": claim.record_id, "owner": claim.owner, "fence": claim.attempt}


def running_record(claim: Claim) -> Json:
    """Return a filter for the claim's Record; it matches only while model calls may be added."""
    return {**owned_record(claim), "status": RecordStatus.RUNNING.value}


async def adopt_records(connection: Connection, claims: Sequence[Claim]) -> None:
    """Make the unfinished Records of earlier owners those of ``claims``; a later claim's stay.

    An owner whose end nobody has noted lost its lease.
    """
    is_open: Json = {"$eq": [{"$ifNull": ["$$owner.ended", None]}, None]}
    earlier = _ended_owners(is_open, LEASE)
    updates = []
    for claim in claims:
        ownership = literal(plain(Ownership(owner=claim.owner, attempt=claim.attempt)))
        query = {
            "_id": claim.record_id, "status": {"$in": _GOES_ON}, "fence": {"$not": {"$gte": claim.attempt}},
        }  # fmt: skip
        is_released = {"$eq": ["$status", RecordStatus.RELEASED.value]}
        fields = {
            "owner": literal(claim.owner), "fence": claim.attempt,
            "status": {"$cond": [is_released, RecordStatus.RUNNING.value, "$status"]},
            "owners": {"$concatArrays": [earlier, [ownership]]},
        }  # fmt: skip
        updates.append(UpdateOne(query, [{"$set": fields}]))
    if updates:
        await connection.collection(RECORD).bulk_write(updates)


async def queue_sampled(connection: Connection, claims: Sequence[Claim]) -> frozenset[str]:
    """Return the ids of the sampled Records of ``claims``; those that were being scored wait for it again.

    Nobody owns them then: a former owner that checked its claim before this cannot say that it scores them.
    """
    records = connection.collection(RECORD)
    sampled: Json = {
        "_id": {"$in": [claim.record_id for claim in claims]},
        "status": {"$in": values(SAMPLED)},
    }
    # Read the ids first: an update tells only a count, and the caller must know whose slots to queue.
    ids = [record["_id"] async for record in records.find(sampled, {"_id": 1})]
    if ids:
        queued = {"status": RecordStatus.COMPLETED.value, "owner": None}
        await records.update_many({"_id": {"$in": ids}}, {"$set": queued})
    return frozenset(ids)


WITHOUT_BRANCHES: Json = {"$nor": [{"status": RecordStatus.RELEASED.value, "owners": []}]}
"""Filter without the branches that divergences dropped: they begin with calls that are counted already."""
RELEASED, LEASE, RESTARTED = "released", "lease", "restarted"
"""Why an ownership ended before its trajectory (``Ownership.ended``)."""

MOST_RESTARTS = 3
"""Times in a row that the state of a trajectory's tools cannot be made again: then its slot fails."""


def _ended_owners(which: Json, why: str) -> Json:
    """Return the expression of a Record's owners, in which those end that satisfy ``which``."""
    ended = {"$mergeObjects": ["$$owner", {"ended": why, "until": "$$NOW"}]}
    owners = {"$ifNull": ["$owners", []]}
    return {"$map": {"input": owners, "as": "owner", "in": {"$cond": [which, ended, "$$owner"]}}}


async def end_records(
    connection: Connection, claims: Sequence[Claim], failure: Failure | None, why: str = RELEASED
) -> None:
    """End the Records of ``claims``: FAILED because of ``failure``, RELEASED if it is None.

    Call it in the transaction that changes the slots. A claim that has no Record yet gets one, so that a late
    owner cannot insert the Record afterwards. ``why`` is noted for a release.
    """
    if not claims:
        return
    status = RecordStatus.RELEASED if failure is None else RecordStatus.FAILED
    changes: Json = {"status": status.value, "failure": plain(failure)}
    records = connection.collection(RECORD)
    ids = [claim.record_id for claim in claims]
    fields = {name: literal(value) for name, value in changes.items()}
    if failure is None:
        fields["owners"] = _ended_owners({"$eq": ["$$owner.attempt", "$fence"]}, why)
    ended = await records.update_many(
        {"_id": {"$in": ids}, "status": {"$in": _UNFINISHED}}, [{"$set": fields}]
    )
    if ended.matched_count == len(claims):
        return
    cursor = records.find({"_id": {"$in": ids}}, {"_id": 1})
    stored = {record["_id"] for record in await cursor.to_list()}
    missing = [claim for claim in claims if claim.record_id not in stored]
    new = [new_record(claim) for claim in missing]
    if failure is None:
        new = [replace(record, owners=(replace(record.owners[0], ended=why, until=now()),)) for record in new]
    if new:
        await records.insert_many([record.to_document() | changes for record in new])


_CLAIMS_PER_TRANSACTION = 256


class CompletedGroups:
    """Collects the groups whose last slot this process scored or failed.

    The process finalizes these groups itself, so that no other process has to look for them.
    """

    def __init__(self) -> None:
        self._task_ids: defaultdict[str, set[str]] = defaultdict(set)

    def note(self, split: str, task_id: str, status: TaskStatus) -> None:
        """Add the group if a write of this process changed its Task to WAITING."""
        if status is TaskStatus.WAITING:
            self._task_ids[split].add(task_id)

    def take(self, split: str) -> list[str]:
        """Return and remove the Task ids of ``split`` that were added since the last call."""
        return sorted(self._task_ids.pop(split, ()))


@dataclass(frozen=True, slots=True)
class _Score:
    """A score for the claim's attempt, as one update of the Task and one of the Record."""

    claim: Claim
    score: float
    details: Json

    @property
    def slot(self) -> UpdateOne:
        """Score the slot, if the claim still holds it."""
        fields = {
            "status": SlotStatus.SCORED.value, "score": self.score, "lease_expires_at": None,
            "owner": literal(self.claim.owner),
        }  # fmt: skip
        return UpdateOne(lease.held(self.claim), lease.change_slot(self.claim, fields))

    @property
    def record(self) -> UpdateOne:
        """Score the Record, if its status is SCORING."""
        query = {
            "_id": self.claim.record_id,
            "status": {"$in": sources(RECORD_EDGES, RecordStatus.SCORED)},
        }
        scored = {"score": self.score, "score_details": self.details}
        changes = {
            "$set": {"status": RecordStatus.SCORED.value, **scored, **seal(RECORD, "score", scored)},
            "$inc": judged(self.details),
            "$currentDate": {"scored_at": True},
        }
        return UpdateOne(query, changes)


class Attempts(Repository):
    """The calls that end an attempt. A claim that is lost raises LeaseLostError, and nothing is written."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._scoring = WriteCoalescer(self._score_batch, self._score)
        self.completed = CompletedGroups()
        """The groups that this process completed."""

    @database_call
    async def score(self, claim: Claim, score: float, details: dict[str, Any] | None = None) -> TaskStatus:
        """End the attempt with a score; return the Task's status (WAITING: the group is complete).

        Idempotent. Scores that arrive at the same time share one transaction.
        """
        return await self._scoring.write(_Score(claim, float(score), plain(details or {})))

    @database_call
    async def fail(
        self, claim: Claim, failure: Failure, *, max_attempts: int, backoff_seconds: float
    ) -> SlotStatus:
        """End the attempt with a failure; return the slot's status: OPEN, or FAILED at ``max_attempts``.

        An open slot may be claimed again after a back-off, which doubles with each attempt that counts and
        varies randomly by ±50 %. The Record becomes FAILED and keeps ``failure``.
        """
        not_before = after_backoff(backoff_seconds, {"$subtract": [lease.ATTEMPTS, 1]})
        # Begin anew: going on with the trajectory would only repeat the failure.
        fields = {
            **FREE, **lease.ANEW, "status": lease.failed_or_open(max_attempts), "not_before": not_before,
        }  # fmt: skip

        async def write() -> Task:
            task = await lease.update_slot(self._connection, claim, fields)
            await end_records(self._connection, [claim], failure)
            return task

        return await self._end(claim, write)

    @database_call
    async def postpone(
        self, claim: Claim, why: Failure, *, max_scorings: int, backoff_seconds: float, counts: bool = True
    ) -> SlotStatus:
        """Hand a slot back without a score; return its status: SAMPLED, or FAILED at ``max_scorings``.

        The Record stays sampled and keeps ``why``. It may be scored again after a back-off, which doubles
        with each failed attempt to score and varies randomly by ±50 %. Without ``counts``, the scorer was not
        to blame: an outage. At ``max_scorings`` the Record fails; ``agentrl db rescore`` scores it again.
        """
        tried = {"$add": [{"$ifNull": ["$$slot.scorings", 0]}, int(counts)]}
        is_last = {"$and": [counts, {"$gte": [tried, max_scorings]}]}
        fields = {
            # Halve the back-off: ``tried`` counts this attempt already, which doubles the first wait.
            **FREE, "scorings": tried, "not_before": after_backoff(backoff_seconds / 2, tried),
            "status": {"$cond": [is_last, SlotStatus.FAILED.value, SlotStatus.SAMPLED.value]},
        }  # fmt: skip

        async def write() -> Task:
            task = await lease.update_slot(self._connection, claim, fields)
            await self._hand_back(claim, slot_status(task, claim), why, unscored_because=plain(why))
            return task

        return await self._end(claim, write)

    @database_call
    async def await_feedback(self, claim: Claim, hours: float) -> SlotStatus:
        """Hand a sampled slot back without a score, until feedback comes or ``hours`` after it was sampled.

        Return the slot's status: SAMPLED, or FAILED if the time is over; its Record then fails with a failure
        of kind ``feedback``.
        """
        late = Failure(kind=FEEDBACK, message=f"no feedback came within {hours:g} h")

        async def write() -> Task:
            record = await self._collection(RECORD).find_one(_sampled(claim))
            if record is None:
                raise StoreError(f"Record {claim.record_id} is not sampled, so it cannot wait for feedback")
            has_feedback = record.get("reported_reward") is not None
            until: Json = {"$add": [record["completed_at"], round(hours * 3_600_000)]}
            is_over: Json = {"$and": [not has_feedback, {"$lte": [until, "$$NOW"]}]}
            fields = {
                **FREE,
                "status": {"$cond": [is_over, SlotStatus.FAILED.value, SlotStatus.SAMPLED.value]},
                "not_before": None if has_feedback else {"$cond": [is_over, None, until]},
            }
            task = await lease.update_slot(self._connection, claim, fields)
            await self._hand_back(claim, slot_status(task, claim), late)
            return task

        return await self._end(claim, write)

    async def release(self, claim: Claim) -> None:
        """Release one slot; see ``release_all``. Raises LeaseLostError if the claim is lost."""
        if await self.release_all([claim]):
            raise lease_lost(claim)

    @database_call
    async def release_all(self, claims: Sequence[Claim]) -> list[Claim]:
        """Release unfinished slots; return the lost claims, whose slots are unchanged.

        A released slot is open at once, its attempt does not count, and its Record becomes RELEASED until the
        next owner goes on with it. The slot of a sampled Record waits for its score instead. Up to 256 claims
        share one transaction, which bounds the time of a shutdown.
        """
        lost: list[Claim] = []
        for batch in batches(claims, _CLAIMS_PER_TRANSACTION):
            lost += await self._release(batch)
        return lost

    @database_call
    async def begin_anew(self, claim: Claim, why: Failure) -> SlotStatus:
        """End a trajectory that cannot go on; return the slot's status: OPEN, or FAILED at ``MOST_RESTARTS``.

        The next claim begins a new Record. It uses no attempt: where samplers die rarely, the new trajectory
        comes to its end. The last one fails with ``why``, for else it would begin anew forever.
        """
        restarts = {"$add": [{"$ifNull": ["$$slot.restarts", 0]}, 1]}
        is_last = {"$gte": [restarts, MOST_RESTARTS]}
        # Keep the deaths: a trajectory that kills its samplers may never come back to where it did.
        fields = {
            **lease.RELEASED, "begun": None, "restarts": restarts,
            "status": {"$cond": [is_last, SlotStatus.FAILED.value, SlotStatus.OPEN.value]},
        }  # fmt: skip

        async def write() -> Task:
            task = await lease.update_slot(self._connection, claim, fields)
            is_open = slot_status(task, claim) is SlotStatus.OPEN
            often = f"began anew {MOST_RESTARTS - 1} times, and cannot again: {why.message}"
            failure = None if is_open else replace(why, message=often)
            await end_records(self._connection, [claim], failure, RESTARTED)
            return task

        return await self._end(claim, write)

    async def _score(self, score: _Score) -> TaskStatus:
        claim = score.claim
        if (scored := await self._score_batch([score])) is not None:
            return scored[0]
        if (stored := await self._status_if_scored(claim)) is not None:
            self.completed.note(claim.task.split, claim.task.id, stored)
            return stored
        if await lost_claims(self._connection, [claim]):
            raise lease_lost(claim)
        raise StoreError(f"Record {claim.record_id} is not being scored, so it cannot take a score")

    async def _score_batch(self, scores: Sequence[_Score]) -> list[TaskStatus] | None:
        slot_updates, record_updates = [score.slot for score in scores], [score.record for score in scores]
        ids = {score.claim.task.id for score in scores}

        async def write() -> dict[str, TaskStatus] | None:
            # The Task last: whoever renews a lease of its group waits until this transaction ends.
            for collection, updates in ((RECORD, record_updates), (TASK, slot_updates)):
                result = await self._collection(collection).bulk_write(updates)
                # Undo all if one is refused: each score is then written alone and gets its own error.
                if result.matched_count < len(updates):
                    await abort()
                    return None
            cursor = self._collection(TASK).find({"_id": {"$in": list(ids)}}, {"status": 1})
            return {task["_id"]: TaskStatus(task["status"]) for task in await cursor.to_list()}

        statuses = await self._connection.transaction(write)
        if statuses is None:
            return None
        for task in {score.claim.task.id: score.claim.task for score in scores}.values():
            self.completed.note(task.split, task.id, statuses[task.id])
        # Tell only one caller of a batch that its group is complete, however many scores ended it.
        last = {score.claim.task.id: index for index, score in enumerate(scores)}
        return [
            statuses[task] if index == last[task] else TaskStatus.RUNNING
            for index, task in enumerate(score.claim.task.id for score in scores)
        ]

    async def _status_if_scored(self, claim: Claim) -> TaskStatus | None:
        """Return the Task's status if this claim has scored its slot already; None otherwise."""
        slot = {
            "traj_id": claim.traj_id, "attempt": claim.attempt, "owner": claim.owner,
            "status": SlotStatus.SCORED.value,
        }  # fmt: skip
        task = await self._collection(TASK).find_one(
            {"_id": claim.task.id, "slots": {"$elemMatch": slot}}, {"status": 1}
        )
        return None if task is None else TaskStatus(task["status"])

    async def _release(self, claims: Sequence[Claim]) -> list[Claim]:
        async def write() -> list[Claim]:
            lost = await lost_claims(self._connection, claims)
            lost_ids = {claim.record_id for claim in lost}
            held = [claim for claim in claims if claim.record_id not in lost_ids]
            if held:
                queued = await queue_sampled(self._connection, held)
                updates = [
                    UpdateOne(
                        lease.held(claim),
                        lease.change_slot(claim, QUEUED if claim.record_id in queued else lease.RELEASED),
                    )
                    for claim in held
                ]
                await self._collection(TASK).bulk_write(updates, ordered=True)
                ended = [claim for claim in held if claim.record_id not in queued]
                await end_records(self._connection, ended, None)
            return lost

        return await self._connection.transaction(write)

    async def _end(self, claim: Claim, write: Callable[[], Coroutine[Any, Any, Task]]) -> SlotStatus:
        """Run the transaction that ends a claim; return the status of its slot."""
        task = await self._connection.transaction(write)
        self.completed.note(task.split, task.id, task.status)
        return slot_status(task, claim)

    async def _hand_back(self, claim: Claim, slot: SlotStatus, failure: Failure, **fields: Json) -> None:
        """Let the sampled Record of a claim wait for a score, or fail as its slot has failed."""
        changes: Json = {**fields, "status": RecordStatus.COMPLETED.value}
        if slot is SlotStatus.FAILED:
            changes |= {"status": RecordStatus.FAILED.value, "failure": plain(failure)}
        result = await self._collection(RECORD).update_one(_sampled(claim), {"$set": changes})
        if result.matched_count != 1:
            raise StoreError(f"Record {claim.record_id} is not sampled, so it cannot wait for a score")


def _sampled(claim: Claim) -> Json:
    """Return a filter for the claim's Record, if it is sampled and has no score."""
    return {"_id": claim.record_id, "status": {"$in": values(SAMPLED)}}
