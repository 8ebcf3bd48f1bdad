"""Claim slots of Tasks for samplers and scorers, under leases that fence every write of a claim."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from bson import ObjectId
from pymongo import ASCENDING, DESCENDING, ReturnDocument, UpdateOne
from pymongo.errors import DuplicateKeyError, PyMongoError

from agentrl.base.concurrency import Backoff
from agentrl.documents.mixture import MIXED_SPLIT
from agentrl.documents.record import Failure
from agentrl.documents.run import ADMISSION, TURN, Gate
from agentrl.documents.status import (
    APPLIED_STEPS,
    SAMPLED,
    DataStatus,
    RecordStatus,
    SlotStatus,
    TaskStatus,
    values,
)
from agentrl.documents.task import CONVERSATIONS, FEEDBACK, Claim, Slot, Task
from agentrl.errors import DATABASE, StoreError
from agentrl.store.epochs import BY_BEGIN, BY_ORDER, Selection, TaskSelection, sort_key
from agentrl.store.mechanics import lease
from agentrl.store.mechanics.connection import (
    DATA,
    GATE,
    GATEWAY_CALL,
    MODEL_CALL,
    OUTAGE,
    RECORD,
    STEP,
    TASK,
    TRANSACTION,
    Connection,
    Json,
    Repository,
    WriteCoalescer,
    abort,
    database_call,
    use_session,
)
from agentrl.store.mechanics.lease import FREE, QUEUED, after, literal, lost_claims
from agentrl.store.mixture import MixtureSelection
from agentrl.store.records import (
    LEASE,
    MOST_RESTARTS,
    CompletedGroups,
    adopt_records,
    end_records,
    queue_sampled,
)

_TRANSIENT = "TransientTransactionError"


@dataclass(frozen=True, slots=True)
class Needs:
    """Tool servers, scorers and environments that are down, or whose sessions are all in use.

    A task needs the servers in its ``tools``, or every server without them.
    """

    servers: frozenset[str] = frozenset()
    scorers: frozenset[str] = frozenset()
    known: frozenset[str] | None = None
    """If not None, a task that names any other server needs something of these too: a manager is down, and
    nobody knows the names of its servers."""
    environments: frozenset[str] = frozenset()
    """Names of environments, and the addresses in a task's ``meta.server``."""

    @property
    def excluded(self) -> Json:
        """Return a filter for the tasks that need none of them."""
        needed: list[Json] = []
        if self.servers:
            needed += [{"tools": None}, {"tools": {"$in": sorted(self.servers)}}]
        if self.known is not None:
            needed.append({"tools": {"$elemMatch": {"$nin": sorted(self.known)}}})
        if self.scorers:
            needed.append({"scorer": {"$in": sorted(self.scorers)}})
        if self.environments:
            names = {"$in": sorted(self.environments)}
            needed += [{"environment": names}, {"meta.server": names}]
        return {"$nor": needed} if needed else {}


NOTHING = Needs()


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """The maximum number of open groups; with ``after_step``, valid while that is the last committed step.

    A later step frees capacity for groups of the next policy only. ``engines_lag``: the limit will grow when
    the engines have loaded the newest version; poll for it, because no event announces it.
    """

    groups: int
    after_step: int | None = None
    engines_lag: bool = False

    @property
    def query(self) -> Json:
        """Return a filter that excludes the unclaimed admitted groups beyond this limit."""
        allowed: Json = {"admission.rank": {"$not": {"$gt": self.groups}}}
        if self.after_step is not None:
            allowed["admission.after_step"] = {"$not": {"$gt": self.after_step}}
        return allowed

    def allows(self, admission: Json) -> bool:
        """Return whether this limit allows to claim an unclaimed group with this ``Task.admission``."""
        is_current = self.after_step is None or admission["after_step"] <= self.after_step
        return is_current and bool(admission["rank"] <= self.groups)


class AdmissionRacedError(Exception):
    """Another sampler admitted groups at the same moment; nothing was written."""


@dataclass(frozen=True, slots=True)
class _OpenGroups:
    """The number of open groups of a split, and the unclaimed groups among them, in order."""

    count: int
    unclaimed: tuple[Json, ...]

    @property
    def claimed(self) -> int:
        return self.count - len(self.unclaimed)

    def needs_renumbering(self, limit: GroupLimit) -> bool:
        """Return whether ``limit`` excludes an unclaimed group although it allows more claimed groups."""
        excluded = any(not limit.allows(group["admission"]) for group in self.unclaimed)
        return excluded and self.claimed < limit.groups


class GroupAdmission(Repository):
    """Counts open groups and admits new ones up to a limit: the next in order, or by a ``Selection``.

    One transaction admits a batch: the next groups change from created to running with all slots open. Any
    sampler then claims these slots by a plain update. So the sampler that claims a group may have a lower
    limit than the one that admitted it: its engines lag, or it computed its limit before the last step.
    Therefore an unclaimed group keeps its rank among the open groups (``Task.admission``), and a sampler
    claims it only if the rank is within its own limit. Groups are trained in the order of their ranks, and
    ranks only decrease, so the bound on staleness holds for every sampler. The first claim of a slot clears
    the rank. If ranks are too high because earlier groups have been trained, the next admission renumbers the
    unclaimed groups.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._selection = TaskSelection(connection)
        self._mixture = MixtureSelection(connection)
        self._is_mixed = False
        """The last admission found a mixture: a look before the next one asks it."""
        self._goes_on = False
        """The last admission, here or in another process, admitted groups: the next one may do too."""

    async def count(self, split: str) -> int:
        """Return how many groups are open: running, waiting, or finalized with untrained data.

        Conversations, which no sampler runs, count when they are finalized.
        """
        admitted = [TaskStatus.RUNNING.value, TaskStatus.WAITING.value]
        running = await self._collection(TASK).count_documents(
            {"split": split, "status": {"$in": admitted}, "epoch": {"$ne": CONVERSATIONS}}
        )
        untrained = {
            "split": split,
            "status": {"$in": [DataStatus.READY.value, DataStatus.PLANNED.value]},
            "trained_count": 0,
        }
        return running + len(await self._collection(DATA).distinct("task", untrained))

    async def admit(
        self, split: str, limit: GroupLimit, selection: Selection | None = None, without: Needs = NOTHING,
        epochs: int = 1,
    ) -> bool:  # fmt: skip
        """Admit the next groups up to ``limit``; return whether there may now be slots to claim.

        Tasks that need something in ``without`` are left for later. Of a mixture, its turns choose the
        groups; its sources have up to ``epochs`` epochs.

        The transaction first writes the ``Admission`` document, so that of two concurrent admissions one
        commits and the other raises AdmissionRacedError. No other sampler can admit groups while this one
        counts them, so the limit is exact. Before the transaction a sampler takes its turn: a hundred that
        run out of slots together would otherwise count all of them, to learn that one has won.
        """
        if limit.groups <= 0:
            return False
        # Look before the turn, which is a write: idle samplers would write again and again for nothing. The
        # look of a selection also clears marks of tasks.
        is_likely = self._goes_on and selection is None
        if not is_likely and not await self._has_next(split, limit, selection, without, epochs):
            return False
        # Suppose so after a lost race too: if nothing is left, the next turn finds it.
        self._goes_on = True
        until = await self._take_turn()
        self._goes_on = False
        try:
            self._goes_on = await self._admit_next(split, limit, selection, without, epochs)
        finally:
            over = {"_id": TURN, "turn_until": until}  # else it is another's: this took too long
            await self._collection(GATE).update_one(over, {"$set": {"turn_until": None}})
        return self._goes_on

    async def _has_next(
        self, split: str, limit: GroupLimit, selection: Selection | None, without: Needs, epochs: int
    ) -> bool:
        """Return whether an admission would change something."""
        open_now = await self._open_groups(split)
        if open_now.needs_renumbering(limit):
            return True
        capacity = limit.groups - open_now.count
        if self._is_mixed and split == MIXED_SPLIT:
            return capacity > 0 and await self._mixture.any_left(epochs, without.excluded)
        if selection is None or capacity <= 0:
            return bool(await self._next_groups(split, min(capacity, 1), without))
        return await self._selection.any_left(split, selection, without.excluded)

    async def _take_turn(self) -> datetime:
        """Begin the turn of this process; return its end. Raises AdmissionRacedError while another has it.

        A process that dies in its turn holds the others up for ``_TURN_SECONDS``. The turn only saves work:
        of two processes that admit at once, one fails in its transaction. The turn has a document of its
        own: a write to one that a transaction has written is tried again and again in the database, and a
        thousand samplers that wait so leave no time for the transaction.
        """
        is_over = {"$lte": [{"$ifNull": ["$turn_until", "$$NOW"]}, "$$NOW"]}
        turn = await self._collection(GATE).find_one_and_update(
            {"_id": TURN, "$expr": is_over}, [{"$set": {"turn_until": after(_TURN_SECONDS)}}],
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip
        if turn is None:
            raise AdmissionRacedError
        until: datetime = turn["turn_until"]
        return until

    async def _admit_next(
        self, split: str, limit: GroupLimit, selection: Selection | None, without: Needs, epochs: int
    ) -> bool:
        async with self._connection.client.start_session() as session:
            try:
                async with await session.start_transaction(**TRANSACTION):
                    with use_session(session):
                        if await self._admit(split, limit, selection, without, epochs):
                            return True
                    await session.abort_transaction()
                    return False
            except PyMongoError as error:
                # Count a duplicate as a race: an epoch that opens may insert the same copy of a task.
                if error.has_error_label(_TRANSIENT) or isinstance(error, DuplicateKeyError):
                    raise AdmissionRacedError from error
                raise

    async def _admit(
        self, split: str, limit: GroupLimit, selection: Selection | None, without: Needs, epochs: int
    ) -> bool:
        found = await self._collection(GATE).find_one_and_update(
            {"_id": ADMISSION}, {"$inc": {"opened": 1}}, return_document=ReturnDocument.AFTER
        )
        gate = Gate.from_document(found or {"_id": ADMISSION})
        applied = {"status": {"$in": values(APPLIED_STEPS)}}
        last = await self._collection(STEP).find_one(applied, {"step": 1}, sort=[("step", DESCENDING)])
        step = 0 if last is None else int(last["step"])
        if limit.after_step not in (None, step):
            return False
        open_now = await self._open_groups(split)
        capacity = limit.groups - open_now.count
        is_changed = False
        self._is_mixed = bool(gate.sources)
        if self._is_mixed and split == MIXED_SPLIT:
            groups: Sequence[str]
            groups, is_changed = await self._mixture.begin(gate, step, capacity, epochs, without.excluded)
        elif selection is None:
            groups = await self._next_groups(split, capacity, without)
        else:
            groups = await self._selection.begin(split, selection, capacity, without.excluded)
        ranked_before = open_now.count
        if open_now.needs_renumbering(limit):
            groups = [*(group["_id"] for group in open_now.unclaimed), *groups]
            ranked_before = open_now.claimed
        if not groups:
            return is_changed
        index = {"$indexOfArray": [literal(groups), "$_id"]}
        admission = {"rank": {"$add": [index, ranked_before + 1]}, "after_step": step}
        fields = {"status": TaskStatus.RUNNING.value, "admission": admission, "updated_at": "$$NOW"}
        await self._collection(TASK).update_many({"_id": {"$in": groups}}, [{"$set": fields}])
        return True

    async def _open_groups(self, split: str) -> _OpenGroups:
        unclaimed = self._collection(TASK).find(
            {"split": split, "admission.rank": {"$gt": 0}},
            {"admission": 1, "epoch": 1, "order": 1, "begun.number": 1},
            sort=[("admission.rank", ASCENDING)],
        )  # fmt: skip
        ordered = sorted(await unclaimed.to_list(), key=sort_key)
        return _OpenGroups(await self.count(split), tuple(ordered))

    async def _next_groups(self, split: str, capacity: int, without: Needs) -> Sequence[str]:
        """Return the ids of the next groups: up to ``capacity`` groups or ``_ADMITTED_SLOTS`` slots."""
        if capacity <= 0:
            return []
        created = self._collection(TASK).find(
            {"split": split, "status": TaskStatus.CREATED.value, **without.excluded},
            {"generations": {"$size": "$slots"}}, sort=BY_ORDER, limit=min(capacity, _ADMITTED_SLOTS),
        )  # fmt: skip
        groups: list[str] = []
        total = 0
        async for task in created:
            if total >= _ADMITTED_SLOTS:
                break
            groups.append(task["_id"])
            total += task["generations"]
        return groups


_TURN_SECONDS = 10.0
"""Longer than an admission takes on a busy machine: another that begins meanwhile would fail, and it too."""
_ADMITTED_SLOTS = 512
"""Maximum number of slots that one admission takes in order; the last group may exceed it. An admission costs
a dozen commands, and as many processes as wait for it ask again and again."""
_ADMISSIONS = 7
"""Attempts to admit a group that another claimer may win: some three to six seconds."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """The arguments of one ``Claims.claim``; equal requests of several owners share one write."""

    owner: str
    split: str
    lease_seconds: float
    limit: GroupLimit | None
    selection: Selection | None
    without: Needs = NOTHING
    epochs: int = 1


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
        max_groups_open: int | GroupLimit | None = None,
        selection: Selection | None = None, without: Needs = NOTHING, epochs: int = 1,
    ) -> Claim | None:  # fmt: skip
        """Claim one slot by one atomic write; return None if there is nothing to claim.

        Tasks that need something in ``without`` are neither claimed nor admitted.

        Tries in this order: an open slot of an admitted group, in the order in which groups were begun; a
        slot whose lease has expired; a slot of a group that is admitted now, chosen by ``selection`` if
        given, while fewer than ``max_groups_open`` groups are open (see ``GroupAdmission``). Claims of one
        process that arrive at the same time share one write. Each source of a mixture has up to ``epochs``
        epochs.
        """
        limit = GroupLimit(max_groups_open) if isinstance(max_groups_open, int) else max_groups_open
        request = ClaimRequest(owner, split, lease_seconds, limit, selection, without, epochs)
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
            **excluded, **lease.any_slot(lease.UNSCORED),
        }  # fmt: skip
        tasks = self._collection(TASK)
        # Look before the transaction: a scorer that polls an empty queue then costs one indexed read.
        if limit < 1 or await tasks.find_one(query, {"_id": 1}) is None:
            return []
        owners = [owner] * limit
        update = lease.claim_slots(lease.UNSCORED, owners, lease_seconds, new_attempt=False)

        async def write() -> list[Claim]:
            task = await tasks.find_one_and_update(
                query, update, sort=BY_BEGIN, return_document=ReturnDocument.AFTER
            )
            if task is None:
                return []
            claims = lease.new_claims(task, owners)
            await self._own_records(claims)
            return claims

        return await self._connection.transaction(write)

    @database_call
    async def unscored(self, split: str, only_scorer: str | None = None) -> int:
        """Return the number of sampled trajectories that wait for a score, or for that of ``only_scorer``."""
        return await count_unscored(self._connection, split, only_scorer)

    @database_call
    async def heartbeat(self, claims: Sequence[Claim], lease_seconds: float) -> list[Claim]:
        """Renew the leases of ``claims``, also expired ones; return the claims that others took over."""
        if not claims:
            return []
        renewals = [UpdateOne(lease.held(claim), lease.renew_lease(claim, lease_seconds)) for claim in claims]
        await self._collection(TASK).bulk_write(renewals, ordered=False)
        # Find the lost ones by a read: a bulk write tells how many matched, not which.
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
            lease.claim_of(task, slot, owner)
            for task in tasks
            for slot in task.slots
            if slot.owner == owner and slot.status is SlotStatus.RUNNING
        ]

    @database_call
    async def reopen_failed(self, split: str) -> int:
        """Open the failed slots of groups that are not finalized, with all their attempts.

        Conversations stay as they are: their users are gone. So do slots that kill their samplers, and those
        whose tools cannot be restored: every start would repeat what has failed three times. `agentrl db
        reopen` opens them by name. Returns the number of Tasks.
        """
        failed = {
            "$and": [
                {"$eq": ["$$slot.status", SlotStatus.FAILED.value]},
                {"$lt": [{"$ifNull": ["$$slot.deaths", 0]}, POISON_DEATHS]},
                {"$lt": [{"$ifNull": ["$$slot.restarts", 0]}, MOST_RESTARTS]},
            ]
        }
        reopened = {
            "status": SlotStatus.FAILED.value,
            "deaths": {"$not": {"$gte": POISON_DEATHS}}, "restarts": {"$not": {"$gte": MOST_RESTARTS}},
        }  # fmt: skip
        query = {
            "split": split,
            "status": {"$in": [TaskStatus.RUNNING.value, TaskStatus.WAITING.value]},
            "slots": {"$elemMatch": reopened},
            "epoch": {"$ne": CONVERSATIONS},
        }
        result = await self._collection(TASK).update_many(query, lease.change_slots(failed, lease.REOPENED))
        return result.modified_count

    async def _claim_batch(
        self, requests: Sequence[ClaimRequest]
    ) -> list[Claim | PyMongoError | None] | None:
        """Claim for all owners; None if the requests differ in more than the owner.

        Claims that were made before an error are returned.
        """
        if len({replace(request, owner="") for request in requests}) > 1:
            return None
        claims: list[Claim | PyMongoError | None] = [None] * len(requests)
        waiting = list(range(len(requests)))
        while waiting:
            try:
                taken = await self._claim_next(requests[0], [requests[index].owner for index in waiting])
            except PyMongoError as error:
                for index in waiting:
                    claims[index] = error
                break
            for index, claim in zip(waiting, taken, strict=True):
                claims[index] = claim
            if not any(taken):
                break
            waiting = [index for index in waiting if claims[index] is None]
        return claims

    async def _claim_next(self, request: ClaimRequest, owners: Sequence[str]) -> list[Claim | None]:
        """Claim a slot for each of ``owners``, or None: another process was first, or nothing is left."""
        # Pause at random: those that lost a race together would meet again at once.
        race = Backoff("another claimer's admission", 0.05, 5.0, jitter=0.5)
        nothing: list[Claim | None] = [None] * len(owners)
        for attempt in range(_ADMISSIONS):
            claims = await self._take(request, owners, TaskStatus.RUNNING)
            if any(claims):
                return claims
            # Take over before a group is admitted: the trajectory of a dead owner is of an earlier group.
            if attempt == 0 and (
                expired := await self._expired.take_over(
                    request.split, owners[0], request.lease_seconds, request.without.excluded
                )
            ):
                return [*expired, *nothing[1:]]
            try:
                if request.limit is None or not await self._admission.admit(
                    request.split, request.limit, request.selection, request.without, request.epochs
                ):
                    break
            except AdmissionRacedError:
                await asyncio.sleep(race.next())
        else:
            return await self._take(request, owners, TaskStatus.RUNNING)  # the last attempt may have won
        # Claim a created group itself: without a limit nobody counts open groups, and nobody admits any.
        return await self._take(request, owners, TaskStatus.CREATED) if request.limit is None else nothing

    async def _take(
        self, request: ClaimRequest, owners: Sequence[str], status: TaskStatus
    ) -> list[Claim | None]:
        """Claim open slots of the next groups in ``status``: one for each owner, or None."""
        query = _open_slots(request, status)
        if len(owners) == 1:
            return await self._take_of_group(request, owners, query, BY_BEGIN)
        # Claim of several groups at once: one after another, each would wait for the journal.
        count = {"$size": {"$filter": {"input": "$slots", "as": "slot", "cond": lease.OPEN}}}
        claims: list[Claim | None] = []
        while not any(claims):  # others took all that was found: slots are fewer each time
            groups = self._collection(TASK).find(query, {"open": count}, sort=BY_BEGIN, limit=len(owners))
            shares: list[tuple[str, Sequence[str]]] = []
            left = owners
            async for group in groups:
                shares.append((group["_id"], left[: group["open"]]))
                left = left[group["open"] :]
            if not shares:
                return [None] * len(owners)
            taken = await asyncio.gather(
                *(self._take_of_group(request, own, {**query, "_id": key}) for key, own in shares if own),
                return_exceptions=True,
            )
            errors = [each for each in taken if isinstance(each, BaseException)]
            claims = []
            for (_, own), each in zip(shares, taken, strict=False):
                claims += [None] * len(own) if isinstance(each, BaseException) else each
            # Return what was claimed in spite of an error: otherwise nobody would work on it.
            if errors and not any(claims):
                raise errors[0]
        return [*claims, *[None] * (len(owners) - len(claims))]

    async def _take_of_group(
        self, request: ClaimRequest, owners: Sequence[str], query: Json,
        order: Sequence[tuple[str, int]] | None = None,
    ) -> list[Claim | None]:  # fmt: skip
        """Claim open slots of the first group that matches ``query``, by one atomic write."""
        task = await self._collection(TASK).find_one_and_update(
            query, lease.claim_slots(lease.OPEN, owners, request.lease_seconds),
            sort=order, return_document=ReturnDocument.AFTER,
        )  # fmt: skip
        claims = [] if task is None else lease.new_claims(task, owners)
        return [*claims, *[None] * (len(owners) - len(claims))]

    async def _own_records(self, claims: Sequence[Claim]) -> None:
        """Make the Records of ``claims`` theirs. Raises StoreError unless all of them are sampled."""
        updates = [
            UpdateOne(
                {"_id": claim.record_id, "status": {"$in": values(SAMPLED)}},
                {
                    "$set": {
                        "owner": claim.owner,
                        "fence": claim.attempt,
                        "status": RecordStatus.COMPLETED.value,
                    }
                },
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
    # Name the slots' status beside the expression: MongoDB uses no index for an $expr over an array.
    allowed = {} if request.limit is None else request.limit.query
    return {
        "split": request.split, "status": status.value, "slots.status": SlotStatus.OPEN.value,
        **allowed, **request.without.excluded, **lease.any_slot(lease.OPEN),
    }  # fmt: skip


async def live_claims(connection: Connection, split: str | None = None) -> dict[str, int]:
    """Return {owner: slots that it holds under live leases}, by name, in a split or in all of them."""
    running: Json = {
        "split": {"$gte": ""} if split is None else split,  # the index begins with it
        "status": TaskStatus.RUNNING.value,
    }
    pipeline: list[Json] = [
        {"$match": running},
        {"$project": {"slots": {"$filter": {"input": "$slots", "as": "slot", "cond": lease.LIVE}}}},
        {"$unwind": "$slots"},
        {"$group": {"_id": "$slots.owner", "claims": {"$sum": 1}}},
        {"$sort": {"_id": 1}},
    ]
    groups = await (await connection.collection(TASK).aggregate(pipeline)).to_list()
    return {group["_id"]: int(group["claims"]) for group in groups}


async def count_unscored(connection: Connection, split: str, only_scorer: str | None = None) -> int:
    """Return the number of sampled trajectories of a split that wait for a scorer.

    Those that wait for people, who may take days, count only if ``only_scorer`` names them.
    """
    waits = {"$filter": {"input": "$slots", "as": "slot", "cond": lease.SAMPLED}}
    query: Json = {
        "split": split, "status": TaskStatus.RUNNING.value, "slots.status": SlotStatus.SAMPLED.value,
        "scorer": {"$ne": FEEDBACK} if only_scorer is None else only_scorer,
    }  # fmt: skip
    total = {"$group": {"_id": None, "count": {"$sum": {"$size": waits}}}}
    groups = await (await connection.collection(TASK).aggregate([{"$match": query}, total])).to_list()
    return int(groups[0]["count"]) if groups else 0


RENEWAL_SECONDS = 8.0
"""Time in which every living process renews its leases after an outage; it retries at least every 5 s."""


POISON_DEATHS = 3
"""Owners in a row that die at one entry of a trajectory's journal: then it is what kills them."""


class ExpiredLeases(Repository):
    """The calls on slots whose owner has not renewed its lease.

    The death of an owner uses no attempt: the next one goes on with the trajectory. After ``POISON_DEATHS``
    of them without a new entry in its journal, the slot fails. The slot of a sampled Record is never sampled
    again: it waits for its score.
    """

    def __init__(self, connection: Connection, completed: CompletedGroups) -> None:
        super().__init__(connection)
        self._completed = completed

    @database_call
    async def reap(self, split: str, *, grace_seconds: float = 0.0) -> int:
        """End every claim whose lease has expired; return how many.

        The slot of a sampled Record waits for its score. Any other slot is open again, or failed as poison.
        For ``grace_seconds`` after an outage of the database leases stay that expired during it, because
        nobody could renew them.
        """
        query = {
            "split": split, "status": TaskStatus.RUNNING.value, "epoch": {"$ne": CONVERSATIONS},
            **lease.overdue(lease.EXPIRED),
        }  # fmt: skip
        tasks = await self._all(Task, TASK, query)
        expired = await self._renewable(lease.EXPIRED, grace_seconds) if tasks else None
        if expired is None:
            return 0
        reaped = 0
        for task in tasks:
            for slot in task.slots:
                if slot.status is SlotStatus.RUNNING and slot.owner is not None:
                    reaped += await self._reap_slot(lease.claim_of(task, slot, slot.owner), slot, expired)
        return reaped

    async def take_over(self, split: str, owner: str, lease_seconds: float, excluded: Json) -> list[Claim]:
        """Claim a slot whose lease has expired, and adopt its Record; empty if there is none.

        Tasks that do not match the filter ``excluded`` are left. Within a lease after an outage of the
        database, leases that expired during it stay.
        """
        tasks = self._collection(TASK)
        running: Json = {
            "split": split, "status": TaskStatus.RUNNING.value, "epoch": {"$ne": CONVERSATIONS}, **excluded,
        }  # fmt: skip
        if await tasks.find_one({**running, **lease.overdue(lease.EXPIRED)}, {"_id": 1}) is None:
            return []
        renewable = await self._renewable(lease.EXPIRED, lease_seconds)
        if renewable is None:
            return []
        update = lease.claim_slots(renewable, [owner], lease_seconds, expired=True)

        async def write() -> list[Claim]:
            document = await tasks.find_one_and_update(
                {**running, **lease.overdue(renewable)}, update, sort=[(lease.LEASE_DEADLINE, ASCENDING)],
                return_document=ReturnDocument.AFTER,
            )  # fmt: skip
            if document is None:
                return []
            (claim,) = lease.new_claims(document, [owner])
            previous = document["last_claim"][0]["previous_owner"]
            # An owner of an older version has not noted what it had begun: it was its own attempt.
            begun = None if claim.begun == claim.attempt else claim.begun
            lost = replace(claim, attempt=claim.attempt - 1, begun=begun, owner=previous)
            if await queue_sampled(self._connection, [lost]):
                # Count nothing: the attempt that sampled it waits for its score, as if nobody had claimed.
                uncounted = {"$subtract": ["$$slot.released", 1]}
                queued = {
                    **QUEUED, "attempt": lost.attempt, "begun": lost.first_attempt, "released": uncounted,
                    "record_id": literal(lost.record_id),
                }  # fmt: skip
                await tasks.update_one(lease.held(claim), lease.change_slot(claim, queued))
                return []
            slot = next(slot for slot in claim.task.slots if slot.traj_id == claim.traj_id)
            fields, failure = await self._died(lost, slot)
            task = await lease.update_slot(self._connection, claim, fields)
            if failure is not None:
                await end_records(self._connection, [lost], failure)
                self._completed.note(task.split, task.id, task.status)
                return []
            if lost.record_id != claim.record_id:
                await end_records(self._connection, [lost], None, LEASE)
            await adopt_records(self._connection, [claim])
            return [claim]

        return await self._connection.transaction(write)

    async def _died(self, lost: Claim, slot: Slot) -> tuple[Json, Failure | None]:
        """Return how the death of an owner changes its slot, and the failure of a trajectory that killed it.

        Call it in the transaction that ends the claim.
        """
        record = await self._collection(RECORD).find_one(
            {"_id": lost.record_id}, {"turns": 1, "tool_calls": 1, "owners": 1}
        )
        turns, tools = (0, 0) if record is None else (int(record["turns"]), int(record["tool_calls"]))
        entries = turns + tools
        if record is not None and (come_to := await self._come_to(lost, record)) is not None:
            entries = min(entries, come_to)
        deaths = slot.deaths + 1 if slot.died_at == entries else 1
        fields: Json = {"deaths": deaths, "died_at": entries}
        if deaths < POISON_DEATHS:
            return fields, None
        fields |= {**FREE, "status": SlotStatus.FAILED.value, "begun": None}
        message = (
            f"{deaths} samplers in a row died when it had {turns} model calls and {tools} tool calls; the"
            f" last was {lost.owner}"
        )
        return fields, Failure(kind="poison", message=message)

    async def _come_to(self, lost: Claim, record: Json) -> int | None:
        """Return how many model calls of a program's trajectory a later owner had come to; else None.

        The program starts again from its beginning, and its tools take their time: its owner may die on the
        way to where the last one was, and that is another entry.
        """
        of_record = {"record": lost.record_id}
        is_first = lost.attempt == lost.first_attempt
        if is_first or await self._collection(GATEWAY_CALL).find_one(of_record, {"_id": 1}) is None:
            return None
        replayed = sum(own["replayed"] for own in record["owners"] if own["attempt"] == lost.attempt)
        made = {**of_record, "attempt": lost.attempt}
        return int(replayed) + await self._collection(MODEL_CALL).count_documents(made)

    async def _reap_slot(self, claim: Claim, slot: Slot, expired: Json) -> int:
        # Test the expiry again in the write: a late heartbeat may have renewed the lease since the read.
        this = {"$and": [expired, {"$eq": ["$$slot.traj_id", claim.traj_id]}]}
        query = {**lease.held(claim), **lease.any_slot(this)}

        async def write() -> Json | None:
            failure: Failure | None = None
            fields = QUEUED
            if not await queue_sampled(self._connection, [claim]):
                died, failure = await self._died(claim, slot)
                fields = died if failure is not None else {**lease.RELEASED, **died}
            task = await self._collection(TASK).find_one_and_update(
                query, lease.change_slot(claim, fields), {"status": 1}, return_document=ReturnDocument.AFTER
            )
            if task is None:
                # Undo ``queue_sampled``: it has disowned a Record whose owner may have just renewed it.
                await abort()
            elif fields is not QUEUED:
                await end_records(self._connection, [claim], failure, LEASE)
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
        # Take the server's start from its process id, an ObjectId, which holds the second it was made in.
        process = (hello.get("topologyVersion") or {}).get("processId")
        if isinstance(process, ObjectId) and process.generation_time >= earliest:
            times.append(process.generation_time)
        return max(times, default=None)
