"""Claim slots of Tasks for samplers and scorers, under leases that fence every write of a claim."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pymongo import ReturnDocument, UpdateOne
from pymongo.errors import PyMongoError

from agentrl.documents.status import SAMPLED, RecordStatus, SlotStatus, TaskStatus, values
from agentrl.documents.task import CONVERSATIONS, FEEDBACK, Claim, Task
from agentrl.errors import StoreError
from agentrl.store.admission import NOTHING, AdmissionRacedError, GroupAdmission, GroupLimit, Needs
from agentrl.store.expired_leases import ExpiredLeases
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.mechanics.slots import lost_claims
from agentrl.store.mechanics.write_coalescer import WriteCoalescer
from agentrl.store.names import RECORD, TASK
from agentrl.store.selection import BY_BEGIN, BY_ORDER, Selection

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


class Claims(Repository):
    """The calls by which samplers and scorers claim slots and keep them; ``Attempts`` ends their attempts."""

    def __init__(self, connection: Connection, expired: ExpiredLeases) -> None:
        super().__init__(connection)
        self._admission = GroupAdmission(connection)
        self._expired = expired
        self._claiming = WriteCoalescer[ClaimRequest, Claim | None](self._claim_batch)

    @database_call
    async def claim(
        self, *, split: str, owner: str, lease_seconds: float,
        max_groups_open: int | GroupLimit | None = None, max_attempts: int = 3,
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
    async def claim_sampled(
        self, *, split: str, owner: str, lease_seconds: float, limit: int = 1,
        without_scorers: Collection[str] = (), only_scorer: str | None = None,
    ) -> list[Claim]:  # fmt: skip
        """Claim up to ``limit`` sampled slots of one Task for a score; empty if there is none.

        The earliest group comes first. Tasks whose scorer is in ``without_scorers``, or is not
        ``only_scorer``, are skipped. The attempt stays the same, so nothing is sampled again.
        """
        excluded: Json = {"scorer": {"$nin": sorted(without_scorers)}} if without_scorers else {}
        if only_scorer is not None:
            excluded = {"scorer": only_scorer}
        query = {
            "split": split, "status": TaskStatus.RUNNING.value, "slots.status": SlotStatus.SAMPLED.value,
            **excluded, **slots.any_slot(slots.UNSCORED),
        }  # fmt: skip
        tasks = self._collection(TASK)
        if limit < 1 or await tasks.find_one(query, {"_id": 1}) is None:
            return []
        owners = [owner] * limit
        update = slots.claim_slots(slots.UNSCORED, owners, lease_seconds, new_attempt=False)

        async def write() -> list[Claim]:
            task = await tasks.find_one_and_update(
                query, update, sort=BY_ORDER, return_document=ReturnDocument.AFTER
            )
            if task is None:
                return []
            claims = slots.new_claims(task, owners)
            await self._own_records(claims)
            return claims

        return await self._connection.transaction(write)

    @database_call
    async def unscored(self, split: str) -> int:
        """Return the number of sampled trajectories that wait for a score."""
        return await count_unscored(self._connection, split)

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
        tasks = await self._all(Task, TASK, query)
        return [
            Claim(task=task, traj_id=slot.traj_id, attempt=slot.attempt, owner=owner)
            for task in tasks
            for slot in task.slots
            if slot.owner == owner and slot.status is SlotStatus.RUNNING
        ]

    @database_call
    async def reopen_failed(self, split: str) -> int:
        """Open the failed slots of groups that are not finalized, with all their attempts.

        Conversations stay as they are: their users are gone. Returns the number of Tasks.
        """
        failed = {"$eq": ["$$slot.status", SlotStatus.FAILED.value]}
        query = {
            "split": split,
            "status": {"$in": [TaskStatus.RUNNING.value, TaskStatus.WAITING.value]},
            "slots.status": SlotStatus.FAILED.value,
            "epoch": {"$ne": CONVERSATIONS},
        }
        result = await self._collection(TASK).update_many(query, slots.change_slots(failed, slots.REOPENED))
        return result.modified_count

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
            task = await self._take(_open_slots(request, TaskStatus.RUNNING), update, request.selection)
            if task is not None:
                return slots.new_claims(task, owners)
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
            task = await self._take(_open_slots(request, TaskStatus.CREATED), update)
            if task is not None:
                return slots.new_claims(task, owners)
        return await self._expired.take_over(
            request.split, owners[0], request.lease_seconds, request.max_attempts, request.without.excluded
        )

    async def _take(self, query: Json, update: list[Json], selection: Selection | None = None) -> Json | None:
        return await self._collection(TASK).find_one_and_update(
            query, update, sort=BY_ORDER if selection is None else BY_BEGIN,
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip

    async def _own_records(self, claims: Sequence[Claim]) -> None:
        """Make the Records of ``claims`` theirs. Raises StoreError unless all of them are sampled."""
        updates = [
            UpdateOne(
                {"_id": claim.record_id, "status": {"$in": values(SAMPLED)}},
                {"$set": {"owner": claim.owner, "status": RecordStatus.COMPLETED.value}},
            )
            for claim in claims
        ]
        written = await self._collection(RECORD).bulk_write(updates)
        if written.matched_count != len(updates):
            raise StoreError(
                f"a sampled slot of Task {claims[0].task.id} has no sampled Record",
                hint="list all inconsistencies: agentrl db check",
            )


def _open_slots(request: ClaimRequest, status: TaskStatus) -> Json:
    """Return a filter for groups in ``status`` with an open slot that the request's limit allows."""
    allowed = {} if request.limit is None else request.limit.query
    return {
        "split": request.split, "status": status.value, "slots.status": SlotStatus.OPEN.value,
        **allowed, **request.without.excluded, **slots.any_slot(slots.OPEN),
    }  # fmt: skip


async def live_claims(connection: Connection, split: str | None = None) -> dict[str, int]:
    """Return {owner: slots that it holds under live leases}, by name, in a split or in all of them."""
    running: Json = {
        "split": {"$gte": ""} if split is None else split,  # the index begins with it
        "status": TaskStatus.RUNNING.value,
    }
    pipeline: list[Json] = [
        {"$match": running},
        {"$project": {"slots": {"$filter": {"input": "$slots", "as": "slot", "cond": slots.LIVE}}}},
        {"$unwind": "$slots"},
        {"$group": {"_id": "$slots.owner", "claims": {"$sum": 1}}},
        {"$sort": {"_id": 1}},
    ]
    groups = await (await connection.collection(TASK).aggregate(pipeline)).to_list()
    return {group["_id"]: int(group["claims"]) for group in groups}


async def count_unscored(connection: Connection, split: str) -> int:
    """Return the number of sampled trajectories of a split that wait for a scorer; people may take days."""
    waits = {"$filter": {"input": "$slots", "as": "slot", "cond": slots.SAMPLED}}
    query: Json = {
        "split": split, "status": TaskStatus.RUNNING.value, "slots.status": SlotStatus.SAMPLED.value,
        "scorer": {"$ne": FEEDBACK},
    }  # fmt: skip
    total = {"$group": {"_id": None, "count": {"$sum": {"$size": waits}}}}
    groups = await (await connection.collection(TASK).aggregate([{"$match": query}, total])).to_list()
    return int(groups[0]["count"]) if groups else 0
