"""Take over slots whose lease has expired, or open them again; spare owners whom an outage held up."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from bson import ObjectId
from pymongo import ASCENDING, DESCENDING, ReturnDocument

from agentrl.documents.record import Failure
from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.documents.task import CONVERSATIONS, Claim, Task
from agentrl.errors import DATABASE
from agentrl.store.attempts import CompletedGroups
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.collection import abort
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.mechanics.lease import FREE, literal
from agentrl.store.mechanics.slots import QUEUED
from agentrl.store.names import OUTAGE, TASK
from agentrl.store.records import end_records, queue_sampled

RENEWAL_SECONDS = 8.0
"""Time in which every living process renews its leases after an outage; it retries at least every 5 s."""


class ExpiredLeases(Repository):
    """The calls on slots whose owner has not renewed its lease.

    The slot of a sampled Record is never sampled again: it waits for its score.
    """

    def __init__(self, connection: Connection, completed: CompletedGroups) -> None:
        super().__init__(connection)
        self._completed = completed

    @database_call
    async def reap(self, split: str, max_attempts: int = 3, *, grace_seconds: float = 0.0) -> int:
        """End every attempt whose lease has expired; return how many.

        The slot of a sampled Record waits for its score. Any other slot is open again, or failed at
        ``max_attempts``. For ``grace_seconds`` after an outage of the database leases stay that expired
        during it, because nobody could renew them.
        """
        query = {
            "split": split, "status": TaskStatus.RUNNING.value, "epoch": {"$ne": CONVERSATIONS},
            **slots.overdue(slots.EXPIRED),
        }  # fmt: skip
        tasks = await self._all(Task, TASK, query)
        expired = await self._renewable(slots.EXPIRED, grace_seconds) if tasks else None
        if expired is None:
            return 0
        reaped = 0
        for task in tasks:
            for slot in task.slots:
                if slot.status is SlotStatus.RUNNING and slot.owner is not None:
                    claim = Claim(task=task, traj_id=slot.traj_id, attempt=slot.attempt, owner=slot.owner)
                    reaped += await self._reap_slot(claim, max_attempts, expired)
        return reaped

    async def take_over(
        self, split: str, owner: str, lease_seconds: float, max_attempts: int, excluded: Json
    ) -> list[Claim]:
        """Claim a slot whose lease has expired, and fail the Record of the attempt before; empty if none.

        Tasks that do not match the filter ``excluded`` are left. Within a lease after an outage of the
        database, leases that expired during it stay.
        """
        tasks = self._collection(TASK)
        running: Json = {
            "split": split, "status": TaskStatus.RUNNING.value, "epoch": {"$ne": CONVERSATIONS}, **excluded,
        }  # fmt: skip
        expired = slots.expired(max_attempts)
        if await tasks.find_one({**running, **slots.overdue(expired)}, {"_id": 1}) is None:
            return []
        renewable = await self._renewable(expired, lease_seconds)
        if renewable is None:
            return []
        update = slots.claim_slots(renewable, [owner], lease_seconds)

        async def write() -> list[Claim]:
            document = await tasks.find_one_and_update(
                {**running, **slots.overdue(renewable)}, update, sort=[(slots.LEASE_DEADLINE, ASCENDING)],
                return_document=ReturnDocument.AFTER,
            )  # fmt: skip
            if document is None:
                return []
            (claim,) = slots.new_claims(document, [owner])
            previous = document["last_claim"][0]["previous_owner"]
            lost = Claim(task=claim.task, traj_id=claim.traj_id, attempt=claim.attempt - 1, owner=previous)
            if await queue_sampled(self._connection, [lost]):
                queued = {**QUEUED, "attempt": lost.attempt, "record_id": literal(lost.record_id)}
                await tasks.update_one(slots.held(claim), slots.change_slot(claim, queued))
                return []
            message = f"the lease of {lost.owner} ran out; {claim.owner} took the slot over"
            await end_records(self._connection, [lost], Failure(kind="lease", message=message))
            return [claim]

        return await self._connection.transaction(write)

    async def _reap_slot(self, claim: Claim, max_attempts: int, expired: Json) -> int:
        this = {"$and": [expired, {"$eq": ["$$slot.traj_id", claim.traj_id]}]}
        query = {**slots.held(claim), **slots.any_slot(this)}
        fields = {**FREE, "status": slots.failed_or_open(max_attempts)}
        failure = Failure(kind="lease", message=f"the lease of {claim.owner} ran out")

        async def write() -> Json | None:
            is_sampled = await queue_sampled(self._connection, [claim])
            update = slots.change_slot(claim, QUEUED if is_sampled else fields)
            task = await self._collection(TASK).find_one_and_update(
                query, update, {"status": 1}, return_document=ReturnDocument.AFTER
            )
            if task is None:
                await abort()
            elif not is_sampled:
                await end_records(self._connection, [claim], failure)
            return task

        task = await self._connection.transaction(write)
        if task is None:
            return 0
        self._completed.note(claim.task.split, claim.task.id, TaskStatus(task["status"]))
        return 1

    async def _renewable(self, condition: Json, grace_seconds: float) -> Json | None:
        """Return ``condition`` over ``$$slot``, limited to leases that their owners could have renewed.

        Within ``grace_seconds`` after an outage these are the leases that expired ``RENEWAL_SECONDS`` after
        its end or later. None: no lease may be taken over now. This process has just seen an outage end, or
        has just started: others may see one end now.
        """
        age = time.monotonic() - self._connection.opened_at
        if self._connection.outage.seconds_since < grace_seconds or age < min(grace_seconds, RENEWAL_SECONDS):
            return None
        back = await self._back_at(grace_seconds)
        if back is None:
            return condition
        renewable = literal(back + timedelta(seconds=RENEWAL_SECONDS))
        return {"$and": [condition, {"$gt": ["$$slot.lease_expires_at", renewable]}]}

    async def _back_at(self, seconds: float) -> datetime | None:
        """Return when the database came back; None if that is more than ``seconds`` ago.

        The server knows its own start; processes that have seen an outage have stored its end. Times are the
        server's.
        """
        hello = await self._connection.client.admin.command("hello")
        earliest = hello["localTime"].replace(tzinfo=UTC) - timedelta(seconds=seconds)
        ended = await self._collection(OUTAGE).find_one(
            {"dependency": str(DATABASE), "ended_at": {"$gte": earliest}}, {"ended_at": 1},
            sort=[("ended_at", DESCENDING)],
        )  # fmt: skip
        times = [ended["ended_at"]] if ended else []
        process = (hello.get("topologyVersion") or {}).get("processId")
        if isinstance(process, ObjectId) and process.generation_time >= earliest:
            times.append(process.generation_time)
        return max(times, default=None)
