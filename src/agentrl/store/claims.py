"""Claims: slots of Tasks handed to samplers under leases; every change is fenced by owner and attempt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pymongo import ASCENDING, ReturnDocument, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError

from agentrl.documents.record import Failure
from agentrl.documents.status import (
    SlotStatus,
    TaskStatus,
)  # fmt: skip
from agentrl.documents.task import Claim, Task
from agentrl.store import slots
from agentrl.store.admission import AdmissionRacedError, GroupAdmission, GroupLimit
from agentrl.store.attempts import end_record
from agentrl.store.connection import Connection, Json, database_call
from agentrl.store.leases import lease_lost, lost_claims
from agentrl.store.names import TASK
from agentrl.store.releases import FREE, Releases
from agentrl.store.scores import Scores
from agentrl.store.selection import BY_BEGIN, BY_ORDER, Selection
from agentrl.store.write_coalescer import WriteCoalescer

_MAX_ATTEMPTS = 3
_LONGEST_DOUBLING = 9
_PAUSES = [min(0.002 * 2**number, 0.2) for number in range(40)]
"""Longest pause, in seconds, after each admission that another claimer won."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What one claimer asks for."""

    owner: str
    split: str
    lease_seconds: float
    limit: GroupLimit | None
    max_attempts: int
    selection: Selection | None


class Claims(Scores, Releases):
    """What samplers do with slots. A lost claim is a LeaseLostError, and nothing was written."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._admission = GroupAdmission(connection)
        self._claiming = WriteCoalescer(self._claim_together, self._claim)

    @database_call
    async def claim(
        self, *, split: str, owner: str, lease_seconds: float,
        max_groups_open: int | GroupLimit | None = None, max_attempts: int = _MAX_ATTEMPTS,
        selection: Selection | None = None,
    ) -> Claim | None:  # fmt: skip
        """Take one slot by one atomic write; None where there is none to take.

        Open slots of admitted groups come first, in the order in which the groups were begun. Where there are
        none, new groups are admitted, by ``selection`` if there is one, as long as fewer than
        ``max_groups_open`` are open, whoever else claims at that moment; see ``GroupAdmission``. Then come
        slots whose lease ran out and that have attempts left. Claimers of one process that come at the same
        time share the write that takes slots of a group.
        """
        limit = GroupLimit(max_groups_open) if isinstance(max_groups_open, int) else max_groups_open
        request = ClaimRequest(owner, split, lease_seconds, limit, max_attempts, selection)
        return await self._claiming.write(request)

    @database_call
    async def heartbeat(self, claims: Sequence[Claim], lease_seconds: float) -> list[Claim]:
        """Renew the leases; returns the claims that are lost: run out, or passed on."""
        if not claims:
            return []
        renewals = [UpdateOne(slots.held(claim), slots.renew_lease(claim, lease_seconds)) for claim in claims]
        await self._collection(TASK).bulk_write(renewals, ordered=False)
        return await lost_claims(self._connection, claims)

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
        fields = {**FREE, "status": _failed_or_open(max_attempts), "not_before": slots.after(wait_ms)}

        async def write(session: AsyncClientSession) -> Task:
            task = await self._change(claim, fields, session)
            await end_record(self._connection, claim, failure, session)
            return task

        task = await self._connection.transaction(write)
        self.completed.note(task.split, task.id, task.status)
        return next(slot.status for slot in task.slots if slot.traj_id == claim.traj_id)

    @database_call
    async def reap(self, split: str, max_attempts: int = _MAX_ATTEMPTS) -> int:
        """Free every slot whose lease ran out, or fail it at ``max_attempts``; returns how many."""
        query = {"split": split, "status": TaskStatus.RUNNING.value, **slots.overdue(slots.EXPIRED)}
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
        """Open the failed slots of groups that are not finalized, with all their attempts; returns Tasks."""
        failed = {"$eq": ["$$slot.status", SlotStatus.FAILED.value]}
        fields = {
            **FREE, "status": SlotStatus.OPEN.value, "released": "$$slot.attempt", "not_before": None,
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
        """Groups admitted and not yet trained: running, waiting, or finalized with untrained data."""
        return await self._admission.count(split)

    async def _claim(self, request: ClaimRequest) -> Claim | None:
        claims = await self._claim_of_one_group(request, [request.owner])
        return claims[0] if claims else None

    async def _claim_together(
        self, requests: Sequence[ClaimRequest]
    ) -> list[Claim | PyMongoError | None] | None:
        """Group after group; what was taken before an error has its owner."""
        if len({replace(request, owner="") for request in requests}) > 1:
            return None
        claims: list[Claim | PyMongoError | None] = []
        while len(claims) < len(requests):
            owners = [request.owner for request in requests[len(claims) :]]
            try:
                claims += await self._claim_of_one_group(requests[0], owners) or [None] * len(owners)
            except PyMongoError as error:
                claims += [error] * len(owners)
        return claims

    async def _claim_of_one_group(self, request: ClaimRequest, owners: Sequence[str]) -> list[Claim]:
        """Slots of one Task for as many of ``owners`` as it has; none where there is nothing to take."""
        update = slots.claim_slots(slots.OPEN, owners, request.lease_seconds)
        for longest_pause in _PAUSES:
            found = await self._take(_open_slots(request, TaskStatus.RUNNING), update, request.selection)
            if found is not None:
                return _claims_of(found, owners)
            try:
                if request.limit is None or not await self._admission.admit(
                    request.split, request.limit, request.selection
                ):
                    break
            except AdmissionRacedError:
                await asyncio.sleep(random.uniform(0, longest_pause))
        else:
            return []
        if request.limit is None:
            found = await self._take(_open_slots(request, TaskStatus.CREATED), update)
            if found is not None:
                return _claims_of(found, owners)
        return await self._take_over(request)

    async def _take(self, query: Json, update: list[Json], selection: Selection | None = None) -> Json | None:
        return await self._collection(TASK).find_one_and_update(
            query, update, sort=BY_ORDER if selection is None else BY_BEGIN,
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip

    async def _take_over(self, request: ClaimRequest) -> list[Claim]:
        """A slot whose lease ran out; the Record of the attempt before fails with it."""
        expired = slots.expired(request.max_attempts)
        query = {"split": request.split, "status": TaskStatus.RUNNING.value, **slots.overdue(expired)}
        update = slots.claim_slots(expired, [request.owner], request.lease_seconds)
        tasks = self._collection(TASK)
        if await tasks.find_one(query, {"_id": 1}) is None:
            return []

        async def write(session: AsyncClientSession) -> list[Claim]:
            found = await tasks.find_one_and_update(
                query, update, sort=[(slots.LEASE_DEADLINE, ASCENDING)],
                return_document=ReturnDocument.AFTER, session=session,
            )  # fmt: skip
            if found is None:
                return []
            (claim,) = _claims_of(found, [request.owner])
            lost = _lost_claim(found, claim)
            failure = Failure(
                kind="lease", message=f"the lease of {lost.owner} ran out; {claim.owner} took the slot over"
            )
            await end_record(self._connection, lost, failure, session)
            return [claim]

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
        fields = {**FREE, "status": _failed_or_open(max_attempts)}
        failure = Failure(kind="lease", message=f"the lease of {claim.owner} ran out")

        async def write(session: AsyncClientSession) -> Json | None:
            task = await self._collection(TASK).find_one_and_update(
                query, slots.change_slot(claim, fields), {"status": 1}, session=session,
                return_document=ReturnDocument.AFTER,
            )  # fmt: skip
            if task is not None:
                await end_record(self._connection, claim, failure, session)
            return task

        task = await self._connection.transaction(write)
        if task is None:
            return 0
        self.completed.note(claim.task.split, claim.task.id, TaskStatus(task["status"]))
        return 1


def _open_slots(request: ClaimRequest, status: TaskStatus) -> Json:
    """A filter: groups in ``status`` with an open slot that the request's limit allows to claim."""
    allowed = {} if request.limit is None else request.limit.query
    return {
        "split": request.split, "status": status.value, "slots.status": SlotStatus.OPEN.value,
        **allowed, **slots.any_slot(slots.OPEN),
    }  # fmt: skip


def _failed_or_open(max_attempts: int) -> Json:
    return {
        "$cond": [
            {"$gte": [slots.ATTEMPTS, max_attempts]}, SlotStatus.FAILED.value, SlotStatus.OPEN.value,
        ]
    }  # fmt: skip


def _claims_of(taken: Json, owners: Sequence[str]) -> list[Claim]:
    """The claims that ``slots.claim_slots`` has just made."""
    task = Task.from_document(taken)
    attempts = {slot.traj_id: slot.attempt for slot in task.slots}
    places = [entry["traj_id"] for entry in taken["last_claim"]]
    return [
        Claim(task=task, traj_id=place, attempt=attempts[place], owner=owner)
        for place, owner in zip(places, owners, strict=False)
    ]


def _lost_claim(taken: Json, claim: Claim) -> Claim:
    """The claim that ended when ``claim`` took its slot over."""
    return replace(claim, attempt=claim.attempt - 1, owner=taken["last_claim"][0]["previous_owner"])
