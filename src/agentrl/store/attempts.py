"""End attempts: score, fail, release or postpone them; the slot and its Record change together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import UpdateOne

from agentrl.batches import batches
from agentrl.documents.base import plain
from agentrl.documents.record import Failure
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
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.blobs import seal
from agentrl.store.mechanics.collection import abort
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.mechanics.lease import FREE, after_backoff, literal
from agentrl.store.mechanics.slots import QUEUED, lease_lost, lost_claims, slot_status
from agentrl.store.mechanics.write_coalescer import WriteCoalescer
from agentrl.store.names import RECORD, TASK
from agentrl.store.records import end_records, queue_sampled

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
        return UpdateOne(slots.held(self.claim), self.slot_update)

    @property
    def slot_update(self) -> list[Json]:
        """Return the update of the Task."""
        fields = {
            "status": SlotStatus.SCORED.value, "score": self.score, "lease_expires_at": None,
            "owner": literal(self.claim.owner),
        }  # fmt: skip
        return slots.change_slot(self.claim, fields)

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
        not_before = after_backoff(backoff_seconds, {"$subtract": [slots.ATTEMPTS, 1]})
        fields = {**FREE, "status": slots.failed_or_open(max_attempts), "not_before": not_before}

        async def write() -> Task:
            task = await slots.update_slot(self._connection, claim, fields)
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
            **FREE, "scorings": tried, "not_before": after_backoff(backoff_seconds / 2, tried),
            "status": {"$cond": [is_last, SlotStatus.FAILED.value, SlotStatus.SAMPLED.value]},
        }  # fmt: skip

        async def write() -> Task:
            task = await slots.update_slot(self._connection, claim, fields)
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
            task = await slots.update_slot(self._connection, claim, fields)
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

        A released slot is open at once, its attempt does not count, and its Record becomes RELEASED. The slot
        of a sampled Record waits for its score instead. Up to 256 claims share one transaction, which bounds
        the time of a shutdown.
        """
        lost: list[Claim] = []
        for batch in batches(claims, _CLAIMS_PER_TRANSACTION):
            lost += await self._release(batch)
        return lost

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
            for collection, updates in ((TASK, slot_updates), (RECORD, record_updates)):
                result = await self._collection(collection).bulk_write(updates)
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
        fields = {
            **FREE, "status": SlotStatus.OPEN.value,
            "released": {"$add": [{"$ifNull": ["$$slot.released", 0]}, 1]},
        }  # fmt: skip

        async def write() -> list[Claim]:
            lost = await lost_claims(self._connection, claims)
            lost_ids = {claim.record_id for claim in lost}
            held = [claim for claim in claims if claim.record_id not in lost_ids]
            if held:
                queued = await queue_sampled(self._connection, held)
                updates = [
                    UpdateOne(
                        slots.held(claim),
                        slots.change_slot(claim, QUEUED if claim.record_id in queued else fields),
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
