"""Claims: slots of Tasks handed to samplers under leases; every change is fenced by owner and attempt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pymongo import ASCENDING, ReturnDocument, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.base import plain
from agentrl.documents.record import Failure
from agentrl.documents.status import (
    RECORD_EDGES,
    DataStatus,
    RecordStatus,
    SlotStatus,
    TaskStatus,
    sources,
)  # fmt: skip
from agentrl.documents.task import Claim, Task, record_key
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store import slots
from agentrl.store.connection import Json, Part, database_call
from agentrl.store.names import DATA, RECORD, TASK

_MAX_ATTEMPTS = 3
_UNFINISHED = sources(RECORD_EDGES, RecordStatus.FAILED)


class Claims(Part):
    """What samplers do with slots. A lost claim is a LeaseLostError, and nothing was written."""

    @database_call
    async def claim(
        self, *, split: str, owner: str, lease_seconds: float, max_groups_open: int | None = None,
        max_attempts: int = _MAX_ATTEMPTS,
    ) -> Claim | None:  # fmt: skip
        """Take one slot by one atomic write; None where there is none to take.

        Groups that have begun come first, then new ones by (epoch, order) as long as fewer than
        ``max_groups_open`` are open (claimers that begin a group at the same moment may each pass that
        check). Slots whose lease ran out are taken over while they have attempts left.
        """
        update = slots.claim_one(owner, lease_seconds, max_attempts)
        query = {"split": split, **slots.any_slot(slots.claimable(max_attempts))}
        found = await self._take({**query, "status": TaskStatus.RUNNING.value}, update)
        if found is None and await self._may_open(split, max_groups_open):
            found = await self._take({**query, "status": TaskStatus.CREATED.value}, update)
        if found is None:
            return None
        task = Task.from_document(found)
        traj_id = int(found["last_claim"]["traj_id"])
        slot = next(slot for slot in task.slots if slot.traj_id == traj_id)
        claim = Claim(task=task, traj_id=traj_id, attempt=slot.attempt, owner=owner)
        if claim.attempt > 1:
            await self._fail_superseded(claim)
        return claim

    @database_call
    async def heartbeat(self, claims: Sequence[Claim], lease_seconds: float) -> list[Claim]:
        """Renew the leases; returns the claims that are lost."""
        if not claims:
            return []
        renewals = [UpdateOne(slots.held(claim), slots.renew_lease(claim, lease_seconds)) for claim in claims]
        await self._collection(TASK).bulk_write(renewals, ordered=False)
        ids = list({claim.task.id for claim in claims})
        owned = {
            (task["_id"], slot["traj_id"], slot["attempt"], slot["owner"])
            async for task in self._collection(TASK).find({"_id": {"$in": ids}}, {"slots": 1})
            for slot in task["slots"]
            if slot["status"] == SlotStatus.RUNNING.value
        }
        return [c for c in claims if (c.task.id, c.traj_id, c.attempt, c.owner) not in owned]

    @database_call
    async def release(self, claim: Claim) -> None:
        """Hand an unfinished slot back: it is open at once, and the attempt does not count."""
        fields = {
            **_FREE, "status": SlotStatus.OPEN.value,
            "released": {"$add": [{"$ifNull": ["$$slot.released", 0]}, 1]},
        }  # fmt: skip
        failure = Failure(kind="released", message=f"handed back by {claim.owner}")

        async def write(session: AsyncClientSession) -> None:
            await self._change(claim, fields, session)
            await self._fail_record(claim.record_id, failure, session)

        await self._connection.transaction(write)

    @database_call
    async def fail(
        self, claim: Claim, failure: Failure, *, max_attempts: int, backoff_seconds: float
    ) -> SlotStatus:
        """End the attempt: the slot opens again after a wait, or fails for good at ``max_attempts``.

        The wait doubles with each attempt and is spread by ±50 %.
        """
        wait = backoff_seconds * 2 ** (min(claim.attempt, 10) - 1) * random.uniform(0.5, 1.5)
        fields = {**_FREE, "status": _failed_or_open(max_attempts), "not_before": slots.after(wait)}

        async def write(session: AsyncClientSession) -> Task:
            task = await self._change(claim, fields, session)
            await self._fail_record(claim.record_id, failure, session)
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
        return await self._groups_open(split)

    async def _take(self, query: Json, update: list[Json]) -> Json | None:
        return await self._collection(TASK).find_one_and_update(
            query, update, sort=[("epoch", ASCENDING), ("order", ASCENDING)],
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip

    async def _may_open(self, split: str, limit: int | None) -> bool:
        return limit is None or await self._groups_open(split) < limit

    async def _groups_open(self, split: str) -> int:
        begun = [TaskStatus.RUNNING.value, TaskStatus.WAITING.value]
        running = await self._collection(TASK).count_documents({"split": split, "status": {"$in": begun}})
        untrained = await self._collection(DATA).distinct(
            "task",
            {
                "split": split,
                "status": {"$in": [DataStatus.READY.value, DataStatus.PLANNED.value]},
                "trained_count": 0,
            },
        )
        return running + len(untrained)

    async def _change(self, claim: Claim, fields: Json, session: AsyncClientSession) -> Task:
        task = await self._collection(TASK).find_one_and_update(
            slots.held(claim), slots.change_slot(claim, fields), session=session,
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip
        if task is None:
            raise lease_lost(claim)
        return Task.from_document(task)

    async def _fail_record(
        self, record_id: str, failure: Failure, session: AsyncClientSession | None
    ) -> None:
        await self._collection(RECORD).update_one(
            {"_id": record_id, "status": {"$in": _UNFINISHED}},
            {"$set": {"status": RecordStatus.FAILED.value, "failure": failure.to_document()}},
            session=session,
        )

    async def _fail_superseded(self, claim: Claim) -> None:
        failure = Failure(kind="lease", message=f"its lease ran out; {claim.owner} took the slot over")
        earlier = [record_key(claim.task.id, claim.traj_id, attempt) for attempt in range(1, claim.attempt)]
        await self._collection(RECORD).update_many(
            {"_id": {"$in": earlier}, "status": {"$in": _UNFINISHED}},
            {"$set": {"status": RecordStatus.FAILED.value, "failure": failure.to_document()}},
        )

    async def _reap_slot(self, claim: Claim, max_attempts: int) -> int:
        this = {"$and": [slots.EXPIRED, {"$eq": ["$$slot.traj_id", claim.traj_id]}]}
        query = {**slots.held(claim), **slots.any_slot(this)}
        fields = {**_FREE, "status": _failed_or_open(max_attempts)}
        failure = Failure(kind="lease", message=f"the lease of {claim.owner} ran out")

        async def write(session: AsyncClientSession) -> int:
            update = slots.change_slot(claim, fields)
            result = await self._collection(TASK).update_one(query, update, session=session)
            if result.matched_count:
                await self._fail_record(claim.record_id, failure, session)
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


def lease_lost(claim: Claim) -> LeaseLostError:
    """The error of a write under a claim that no longer holds."""
    return LeaseLostError(
        f"the claim of {claim.owner} on {claim.record_id} has run out or passed to another sampler",
        cure="nothing is lost: another attempt replaces this one; if it happens often, raise --lease_seconds",
    )
