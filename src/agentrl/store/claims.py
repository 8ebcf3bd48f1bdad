"""Claims: slots of Tasks handed to samplers under leases; every change is fenced by owner and attempt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pymongo import ReturnDocument, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.base import plain
from agentrl.documents.record import Failure
from agentrl.documents.status import (
    RECORD_EDGES,
    RecordStatus,
    SlotStatus,
    TaskStatus,
    sources,
)  # fmt: skip
from agentrl.documents.task import Claim, Task
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store import slots
from agentrl.store.attempts import end_record
from agentrl.store.connection import Connection, Json, Part, database_call
from agentrl.store.leases import lost_claims
from agentrl.store.names import RECORD, TASK
from agentrl.store.openings import BY_ORDER, OpeningRacedError, Openings

_MAX_ATTEMPTS = 3
_LONGEST_DOUBLING = 9
_PAUSES = [min(0.002 * 2**number, 0.2) for number in range(40)]
"""Longest pause, in seconds, after each opening of a group that another claimer won."""


class Claims(Part):
    """What samplers do with slots. A lost claim is a LeaseLostError, and nothing was written."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._openings = Openings(connection)

    @database_call
    async def claim(
        self, *, split: str, owner: str, lease_seconds: float, max_groups_open: int | None = None,
        max_attempts: int = _MAX_ATTEMPTS,
    ) -> Claim | None:  # fmt: skip
        """Take one slot by one atomic write; None where there is none to take.

        Open slots of groups that have begun come first, then a new group by (epoch, order) as long as fewer
        than ``max_groups_open`` are open, whoever else claims at that moment; then slots whose lease ran out
        and that have attempts left.
        """
        update = slots.claim_one(slots.OPEN, owner, lease_seconds)
        is_open = slots.any_slot(slots.OPEN)
        begun = {"split": split, "status": TaskStatus.RUNNING.value, **is_open}
        for longest_pause in _PAUSES:
            try:
                found = await self._take(begun, update) or await self._openings.open(
                    split, max_groups_open, is_open, update
                )
                break
            except OpeningRacedError:
                await asyncio.sleep(random.uniform(0, longest_pause))
        else:
            return None
        if found is None:
            found = await self._take_over(split, owner, lease_seconds, max_attempts)
        return None if found is None else _claim_of(found, owner)

    @database_call
    async def heartbeat(self, claims: Sequence[Claim], lease_seconds: float) -> list[Claim]:
        """Renew the leases; returns the claims that are lost: run out, or passed on."""
        if not claims:
            return []
        renewals = [UpdateOne(slots.held(claim), slots.renew_lease(claim, lease_seconds)) for claim in claims]
        await self._collection(TASK).bulk_write(renewals, ordered=False)
        return await lost_claims(self._connection, claims)

    @database_call
    async def release(self, claim: Claim) -> None:
        """Hand an unfinished slot back: it is open at once, and the attempt does not count.

        Its Record is RELEASED.
        """
        fields = {
            **_FREE, "status": SlotStatus.OPEN.value,
            "released": {"$add": [{"$ifNull": ["$$slot.released", 0]}, 1]},
        }  # fmt: skip

        async def write(session: AsyncClientSession) -> None:
            await self._change(claim, fields, session)
            await end_record(self._connection, claim, None, session)

        await self._connection.transaction(write)

    @database_call
    async def fail(
        self, claim: Claim, failure: Failure, *, max_attempts: int, backoff_seconds: float
    ) -> SlotStatus:
        """End the attempt: the slot opens again after a wait, or fails for good at ``max_attempts``.

        The wait doubles with each attempt that counts, and is spread by ±50 %. Its Record is FAILED and keeps
        ``failure``: the failures of a slot that failed for good are those of its Records.
        """
        spread_ms = backoff_seconds * 1000 * random.uniform(0.5, 1.5)
        doublings = {"$min": [{"$subtract": [slots.ATTEMPTS, 1]}, _LONGEST_DOUBLING]}
        wait_ms = {"$toLong": {"$multiply": [spread_ms, {"$pow": [2, doublings]}]}}
        fields = {**_FREE, "status": _failed_or_open(max_attempts), "not_before": slots.after(wait_ms)}

        async def write(session: AsyncClientSession) -> Task:
            task = await self._change(claim, fields, session)
            await end_record(self._connection, claim, failure, session)
            return task

        task = await self._connection.transaction(write)
        return next(slot.status for slot in task.slots if slot.traj_id == claim.traj_id)

    @database_call
    async def score(self, claim: Claim, score: float, details: dict[str, Any] | None = None) -> TaskStatus:
        """End the attempt with a score; returns the Task's status (WAITING: the group is complete).

        Repeating the call after it succeeded changes nothing.
        """
        fields = {
            "status": SlotStatus.SCORED.value, "score": float(score), "owner": slots.literal(claim.owner),
            "lease_expires_at": None,
        }  # fmt: skip
        changes = {
            "$set": {
                "status": RecordStatus.SCORED.value, "score": float(score),
                "score_details": plain(details or {}),
            },
            "$currentDate": {"scored_at": True},
        }  # fmt: skip

        async def write(session: AsyncClientSession) -> Task:
            task = await self._change(claim, fields, session)
            query = {
                "_id": claim.record_id,
                "status": {"$in": sources(RECORD_EDGES, RecordStatus.SCORED)},
            }
            result = await self._collection(RECORD).update_one(query, changes, session=session)
            if result.matched_count != 1:
                raise StoreError(f"Record {claim.record_id} is not being scored: it takes no score")
            return task

        try:
            return (await self._connection.transaction(write)).status
        except LeaseLostError:
            scored = await self._scored_already(claim)
            if scored is None:
                raise
            return scored

    @database_call
    async def reap(self, split: str, max_attempts: int = _MAX_ATTEMPTS) -> int:
        """Free every slot whose lease ran out, or fail it at ``max_attempts``; returns how many."""
        query = {"split": split, "status": TaskStatus.RUNNING.value, **slots.any_slot(slots.EXPIRED)}
        expired = [Task.from_document(document) async for document in self._collection(TASK).find(query)]
        freed = 0
        for task in expired:
            for slot in task.slots:
                if slot.status is SlotStatus.RUNNING and slot.owner is not None:
                    claim = Claim(task=task, traj_id=slot.traj_id, attempt=slot.attempt, owner=slot.owner)
                    freed += await self._reap_slot(claim, max_attempts)
        return freed

    @database_call
    async def reopen_failed(self, split: str) -> int:
        """Open the failed slots of groups that are not finalised, with all their attempts; returns Tasks."""
        failed = {"$eq": ["$$slot.status", SlotStatus.FAILED.value]}
        fields = {
            **_FREE, "status": SlotStatus.OPEN.value, "released": "$$slot.attempt", "not_before": None,
        }  # fmt: skip
        query = {
            "split": split,
            "status": {"$in": [TaskStatus.RUNNING.value, TaskStatus.WAITING.value]},
            "slots.status": SlotStatus.FAILED.value,
        }
        result = await self._collection(TASK).update_many(query, slots.change_slots(failed, fields))
        return result.modified_count

    @database_call
    async def groups_open(self, split: str) -> int:
        """Groups begun and not yet trained: running, waiting, or finalised with untrained data."""
        return await self._openings.count(split)

    async def _take(self, query: Json, update: list[Json]) -> Json | None:
        return await self._collection(TASK).find_one_and_update(
            query, update, sort=BY_ORDER, return_document=ReturnDocument.AFTER
        )

    async def _take_over(
        self, split: str, owner: str, lease_seconds: float, max_attempts: int
    ) -> Json | None:
        """A slot whose lease ran out; the Record of the attempt before fails with it."""
        expired = slots.expired(max_attempts)
        query = {"split": split, "status": TaskStatus.RUNNING.value, **slots.any_slot(expired)}
        update = slots.claim_one(expired, owner, lease_seconds)
        tasks = self._collection(TASK)
        if await tasks.find_one(query, {"_id": 1}) is None:
            return None

        async def write(session: AsyncClientSession) -> Json | None:
            found = await tasks.find_one_and_update(
                query, update, sort=BY_ORDER, return_document=ReturnDocument.AFTER, session=session
            )
            if found is not None:
                lost = _lost_claim(found, _claim_of(found, owner))
                failure = Failure(
                    kind="lease", message=f"the lease of {lost.owner} ran out; {owner} took the slot over"
                )
                await end_record(self._connection, lost, failure, session)
            return found

        return await self._connection.transaction(write)

    async def _change(self, claim: Claim, fields: Json, session: AsyncClientSession) -> Task:
        task = await self._collection(TASK).find_one_and_update(
            slots.held(claim), slots.change_slot(claim, fields), session=session,
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip
        if task is None:
            raise lease_lost(claim)
        return Task.from_document(task)

    async def _reap_slot(self, claim: Claim, max_attempts: int) -> int:
        this = {"$and": [slots.EXPIRED, {"$eq": ["$$slot.traj_id", claim.traj_id]}]}
        query = {**slots.owned(claim), **slots.any_slot(this)}
        fields = {**_FREE, "status": _failed_or_open(max_attempts)}
        failure = Failure(kind="lease", message=f"the lease of {claim.owner} ran out")

        async def write(session: AsyncClientSession) -> int:
            update = slots.change_slot(claim, fields)
            result = await self._collection(TASK).update_one(query, update, session=session)
            if result.matched_count:
                await end_record(self._connection, claim, failure, session)
            return result.matched_count

        return await self._connection.transaction(write)

    async def _scored_already(self, claim: Claim) -> TaskStatus | None:
        slot = {
            "traj_id": claim.traj_id, "attempt": claim.attempt, "owner": claim.owner,
            "status": SlotStatus.SCORED.value,
        }  # fmt: skip
        task = await self._collection(TASK).find_one(
            {"_id": claim.task.id, "slots": {"$elemMatch": slot}}, {"status": 1}
        )
        return None if task is None else TaskStatus(task["status"])


_FREE: Json = {"owner": None, "lease_expires_at": None}


def _failed_or_open(max_attempts: int) -> Json:
    return {
        "$cond": [
            {"$gte": [slots.ATTEMPTS, max_attempts]}, SlotStatus.FAILED.value, SlotStatus.OPEN.value,
        ]
    }  # fmt: skip


def _claim_of(taken: Json, owner: str) -> Claim:
    """The claim that ``slots.claim_one`` has just made."""
    task, traj_id = Task.from_document(taken), int(taken["last_claim"]["traj_id"])
    slot = next(slot for slot in task.slots if slot.traj_id == traj_id)
    return Claim(task=task, traj_id=traj_id, attempt=slot.attempt, owner=owner)


def _lost_claim(taken: Json, claim: Claim) -> Claim:
    """The claim that ended when ``claim`` took its slot over."""
    return replace(claim, attempt=claim.attempt - 1, owner=taken["last_claim"]["previous_owner"])


def lease_lost(claim: Claim) -> LeaseLostError:
    """The error of a write under a claim that no longer holds."""
    return LeaseLostError(
        f"the claim of {claim.owner} on {claim.record_id} has run out or passed to another sampler",
        cure="nothing is lost: another attempt replaces this one; if it happens often, raise --lease_seconds",
    )
