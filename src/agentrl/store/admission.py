"""Admit new groups up to a limit of open groups; one sampler at a time admits a batch of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pymongo import ASCENDING, DESCENDING
from pymongo.errors import DuplicateKeyError, PyMongoError

from agentrl.documents.run import ADMISSION
from agentrl.documents.status import APPLIED_STEPS, DataStatus, TaskStatus, values
from agentrl.documents.task import CONVERSATIONS
from agentrl.store.mechanics.collection import use_session
from agentrl.store.mechanics.connection import TRANSACTION, Connection, Json, Repository
from agentrl.store.mechanics.lease import literal
from agentrl.store.names import DATA, GATE, STEP, TASK
from agentrl.store.selection import BY_ORDER, SLOTS_AT_ONCE, Selection, TaskSelection, sort_key

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
        self, split: str, limit: GroupLimit, selection: Selection | None = None, without: Needs = NOTHING
    ) -> bool:
        """Admit the next groups up to ``limit``; return whether there may now be slots to claim.

        Tasks that need something in ``without`` are left for later.

        The transaction first writes the ``Admission`` document, so that of two concurrent admissions one
        commits and the other raises AdmissionRacedError. No other sampler can admit groups while this one
        counts them, so the limit is exact.
        """
        if limit.groups <= 0:
            return False
        open_now = await self._open_groups(split)
        if not open_now.needs_renumbering(limit):
            capacity = limit.groups - open_now.count
            if selection is None or capacity <= 0:
                left = bool(await self._next_groups(split, capacity, without))
            else:
                left = await self._selection.any_left(split, selection, without.excluded)
            if not left:
                return False
        async with self._connection.client.start_session() as session:
            try:
                async with await session.start_transaction(**TRANSACTION):
                    with use_session(session):
                        if await self._admit(split, limit, selection, without):
                            return True
                    await session.abort_transaction()
                    return False
            except PyMongoError as error:
                if error.has_error_label(_TRANSIENT) or isinstance(error, DuplicateKeyError):
                    raise AdmissionRacedError from error
                raise

    async def _admit(
        self, split: str, limit: GroupLimit, selection: Selection | None, without: Needs
    ) -> bool:
        await self._collection(GATE).update_one({"_id": ADMISSION}, {"$inc": {"opened": 1}})
        applied = {"status": {"$in": values(APPLIED_STEPS)}}
        last = await self._collection(STEP).find_one(applied, {"step": 1}, sort=[("step", DESCENDING)])
        step = 0 if last is None else int(last["step"])
        if limit.after_step not in (None, step):
            return False
        open_now = await self._open_groups(split)
        capacity = limit.groups - open_now.count
        if selection is None:
            groups = await self._next_groups(split, capacity, without)
        else:
            groups = await self._selection.begin(split, selection, capacity, without.excluded)
        ranked_before = open_now.count
        if open_now.needs_renumbering(limit):
            groups = [*(group["_id"] for group in open_now.unclaimed), *groups]
            ranked_before = open_now.claimed
        if not groups:
            return False
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
        """Return the ids of the next groups: up to ``capacity`` groups or ``SLOTS_AT_ONCE`` slots."""
        if capacity <= 0:
            return []
        created = self._collection(TASK).find(
            {"split": split, "status": TaskStatus.CREATED.value, **without.excluded},
            {"generations": {"$size": "$slots"}}, sort=BY_ORDER, limit=min(capacity, SLOTS_AT_ONCE),
        )  # fmt: skip
        groups: list[str] = []
        total = 0
        async for task in created:
            if total >= SLOTS_AT_ONCE:
                break
            groups.append(task["_id"])
            total += task["generations"]
        return groups
