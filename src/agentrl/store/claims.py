"""Claim slots of Tasks for samplers, under leases; owner and attempt fence every write of a claim."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pymongo import ASCENDING, ReturnDocument, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError

from agentrl.documents.record import Failure
from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.documents.task import Claim, Task
from agentrl.store.admission import AdmissionRacedError, GroupAdmission, GroupLimit
from agentrl.store.attempts import Attempts, end_record, failed_or_open, queue_sampled
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.connection import Connection, Json, database_call
from agentrl.store.mechanics.lease import FREE, Availability, literal
from agentrl.store.mechanics.slots import QUEUED, lost_claims
from agentrl.store.mechanics.write_coalescer import WriteCoalescer
from agentrl.store.names import TASK
from agentrl.store.needs import NOTHING, Needs
from agentrl.store.selection import BY_BEGIN, BY_ORDER, Selection

_MAX_ATTEMPTS = 3
_PAUSES = [min(0.002 * 2**number, 0.2) for number in range(40)]
"""Upper bound of the random pause, in seconds, after each admission that another claimer won."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """The arguments of one ``Claims.claim``; equal requests of several owners share one write."""

    owner: str
    split: str
    lease_seconds: float
    limit: GroupLimit | None
    max_attempts: int
    selection: Selection | None
    without: Needs = NOTHING


class Claims(Attempts):
    """The calls of samplers on slots. A claim that is lost raises LeaseLostError, and nothing is written."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._admission = GroupAdmission(connection)
        self._availability = Availability(connection)
        self._claiming = WriteCoalescer(self._claim_batch, self._claim)

    @database_call
    async def claim(
        self, *, split: str, owner: str, lease_seconds: float,
        max_groups_open: int | GroupLimit | None = None, max_attempts: int = _MAX_ATTEMPTS,
        selection: Selection | None = None, without: Needs = NOTHING,
    ) -> Claim | None:  # fmt: skip
        """Claim one slot by one atomic write; return None if there is nothing to claim.

        Tasks that need something in ``without`` are neither claimed nor admitted.

        Tries in this order: an open slot of an admitted group, in the order in which groups were begun; a
        slot of a group that is admitted now, chosen by ``selection`` if given, while fewer than
        ``max_groups_open`` groups are open (see ``GroupAdmission``); a slot whose lease has expired and that
        has attempts left. Claims of one process that arrive at the same time share one write.
        """
        limit = GroupLimit(max_groups_open) if isinstance(max_groups_open, int) else max_groups_open
        request = ClaimRequest(owner, split, lease_seconds, limit, max_attempts, selection, without)
        return await self._claiming.write(request)

    @database_call
    async def heartbeat(self, claims: Sequence[Claim], lease_seconds: float) -> list[Claim]:
        """Renew the leases of ``claims``, also expired ones; return the claims that others took over."""
        if not claims:
            return []
        renewals = [UpdateOne(slots.held(claim), slots.renew_lease(claim, lease_seconds)) for claim in claims]
        await self._collection(TASK).bulk_write(renewals, ordered=False)
        return await lost_claims(self._connection, claims)

    @database_call
    async def of_owner(self, split: str, owner: str) -> list[Claim]:
        """Return the claims that ``owner`` holds according to the database."""
        mine = {"owner": owner, "status": SlotStatus.RUNNING.value}
        query = {
            "split": split, "status": TaskStatus.RUNNING.value, "slots.status": SlotStatus.RUNNING.value,
            "slots": {"$elemMatch": mine},
        }  # fmt: skip
        tasks = [Task.from_document(item) async for item in self._collection(TASK).find(query)]
        return [
            Claim(task=task, traj_id=slot.traj_id, attempt=slot.attempt, owner=owner)
            for task in tasks
            for slot in task.slots
            if slot.owner == owner and slot.status is SlotStatus.RUNNING
        ]

    @database_call
    async def reap(self, split: str, max_attempts: int = _MAX_ATTEMPTS, *, grace_seconds: float = 0.0) -> int:
        """End every attempt whose lease has expired; return how many.

        The slot of a sampled Record waits for its score. Any other slot is open again, or failed at
        ``max_attempts``. For ``grace_seconds`` after an outage of the database leases stay that expired
        during it, because nobody could renew them.
        """
        query = {"split": split, "status": TaskStatus.RUNNING.value, **slots.overdue(slots.EXPIRED)}
        found = [Task.from_document(document) async for document in self._collection(TASK).find(query)]
        expired = await self._availability.expired(slots.EXPIRED, grace_seconds) if found else None
        if expired is None:
            return 0
        reaped = 0
        for task in found:
            for slot in task.slots:
                if slot.status is SlotStatus.RUNNING and slot.owner is not None:
                    claim = Claim(task=task, traj_id=slot.traj_id, attempt=slot.attempt, owner=slot.owner)
                    reaped += await self._reap_slot(claim, max_attempts, expired)
        return reaped

    @database_call
    async def reopen_failed(self, split: str) -> int:
        """Open the failed slots of groups that are not finalized, with all their attempts.

        Returns the number of Tasks.
        """
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

    async def _claim(self, request: ClaimRequest) -> Claim | None:
        claims = await self._claim_from_one_group(request, [request.owner])
        return claims[0] if claims else None

    async def _claim_batch(
        self, requests: Sequence[ClaimRequest]
    ) -> list[Claim | PyMongoError | None] | None:
        """Claim for all owners, one group after another; None if the requests differ in more than the owner.

        Claims that were made before an error are returned.
        """
        if len({replace(request, owner="") for request in requests}) > 1:
            return None
        claims: list[Claim | PyMongoError | None] = []
        while len(claims) < len(requests):
            owners = [request.owner for request in requests[len(claims) :]]
            try:
                claims += await self._claim_from_one_group(requests[0], owners) or [None] * len(owners)
            except PyMongoError as error:
                claims += [error] * len(owners)
        return claims

    async def _claim_from_one_group(self, request: ClaimRequest, owners: Sequence[str]) -> list[Claim]:
        """Claim slots of one Task for as many of ``owners`` as it has; empty if there is nothing to claim."""
        update = slots.claim_slots(slots.OPEN, owners, request.lease_seconds)
        for longest_pause in _PAUSES:
            found = await self._take(_open_slots(request, TaskStatus.RUNNING), update, request.selection)
            if found is not None:
                return new_claims(found, owners)
            try:
                if request.limit is None or not await self._admission.admit(
                    request.split, request.limit, request.selection, request.without
                ):
                    break
            except AdmissionRacedError:
                await asyncio.sleep(random.uniform(0, longest_pause))
        else:
            return []
        if request.limit is None:
            found = await self._take(_open_slots(request, TaskStatus.CREATED), update)
            if found is not None:
                return new_claims(found, owners)
        return await self._take_over(request)

    async def _take(self, query: Json, update: list[Json], selection: Selection | None = None) -> Json | None:
        return await self._collection(TASK).find_one_and_update(
            query, update, sort=BY_ORDER if selection is None else BY_BEGIN,
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip

    async def _take_over(self, request: ClaimRequest) -> list[Claim]:
        """Claim a slot whose lease has expired, and fail the Record of the attempt before.

        A slot whose Record is sampled is not claimed: it waits for its score. Within a lease after an outage
        of the database, leases that expired during it stay.
        """
        tasks = self._collection(TASK)
        expired = slots.expired(request.max_attempts)
        if await tasks.find_one(_expired_slots(request, expired), {"_id": 1}) is None:
            return []
        renewable = await self._availability.expired(expired, request.lease_seconds)
        if renewable is None:
            return []
        query = _expired_slots(request, renewable)
        update = slots.claim_slots(renewable, [request.owner], request.lease_seconds)

        async def write(session: AsyncClientSession) -> list[Claim]:
            found = await tasks.find_one_and_update(
                query, update, sort=[(slots.LEASE_DEADLINE, ASCENDING)],
                return_document=ReturnDocument.AFTER, session=session,
            )  # fmt: skip
            if found is None:
                return []
            (claim,) = new_claims(found, [request.owner])
            lost = _previous_claim(found, claim)
            if await queue_sampled(self._connection, [lost], session):
                queued = {**QUEUED, "attempt": lost.attempt, "record_id": literal(lost.record_id)}
                await tasks.update_one(slots.held(claim), slots.change_slot(claim, queued), session=session)
                return []
            failure = Failure(
                kind="lease", message=f"the lease of {lost.owner} ran out; {claim.owner} took the slot over"
            )
            await end_record(self._connection, lost, failure, session)
            return [claim]

        return await self._connection.transaction(write)

    async def _reap_slot(self, claim: Claim, max_attempts: int, expired: Json) -> int:
        this = {"$and": [expired, {"$eq": ["$$slot.traj_id", claim.traj_id]}]}
        query = {**slots.held(claim), **slots.any_slot(this)}
        fields = {**FREE, "status": failed_or_open(max_attempts)}
        failure = Failure(kind="lease", message=f"the lease of {claim.owner} ran out")

        async def write(session: AsyncClientSession) -> Json | None:
            is_sampled = await queue_sampled(self._connection, [claim], session)
            update = slots.change_slot(claim, QUEUED if is_sampled else fields)
            task = await self._collection(TASK).find_one_and_update(
                query, update, {"status": 1}, session=session, return_document=ReturnDocument.AFTER
            )
            if task is None:
                await session.abort_transaction()
            elif not is_sampled:
                await end_record(self._connection, claim, failure, session)
            return task

        task = await self._connection.transaction(write)
        if task is None:
            return 0
        self.completed.note(claim.task.split, claim.task.id, TaskStatus(task["status"]))
        return 1


def _open_slots(request: ClaimRequest, status: TaskStatus) -> Json:
    """Return a filter for groups in ``status`` with an open slot that the request's limit allows."""
    allowed = {} if request.limit is None else request.limit.query
    return {
        "split": request.split, "status": status.value, "slots.status": SlotStatus.OPEN.value,
        **allowed, **request.without.excluded, **slots.any_slot(slots.OPEN),
    }  # fmt: skip


def _expired_slots(request: ClaimRequest, condition: Json) -> Json:
    """Return a filter for groups with a slot whose lease has expired and that satisfies ``condition``."""
    return {
        "split": request.split, "status": TaskStatus.RUNNING.value, **request.without.excluded,
        **slots.overdue(condition),
    }  # fmt: skip


def new_claims(document: Json, owners: Sequence[str]) -> list[Claim]:
    """Return the claims that ``slots.claim_slots`` has just written into the Task."""
    task = Task.from_document(document)
    attempts = {slot.traj_id: slot.attempt for slot in task.slots}
    traj_ids = [entry["traj_id"] for entry in document["last_claim"]]
    return [
        Claim(task=task, traj_id=traj_id, attempt=attempts[traj_id], owner=owner)
        for traj_id, owner in zip(traj_ids, owners, strict=False)
    ]


def _previous_claim(document: Json, claim: Claim) -> Claim:
    """Return the claim whose slot ``claim`` took over."""
    return replace(claim, attempt=claim.attempt - 1, owner=document["last_claim"][0]["previous_owner"])
