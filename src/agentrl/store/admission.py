"""Admission: bounds how many groups are open; one claimer at a time admits a batch of new groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pymongo import ASCENDING, DESCENDING
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import DuplicateKeyError, PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from agentrl.documents.run import ADMISSION
from agentrl.documents.status import APPLIED_STEPS, DataStatus, TaskStatus, values
from agentrl.store import slots
from agentrl.store.connection import Connection, Json, Repository
from agentrl.store.names import DATA, GATE, STEP, TASK
from agentrl.store.selection import BY_ORDER, SLOTS_AT_ONCE, Selection, TaskSelection, sort_key

_TRANSIENT = "TransientTransactionError"


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """How many groups may be open; with ``after_step``, as long as that is the last committed step.

    A step that commits later frees capacity that belongs to the next policy's groups. ``engines_lag``: the
    limit grows once the engines have loaded the newest version, which nothing announces.
    """

    groups: int
    after_step: int | None = None
    engines_lag: bool = False

    @property
    def query(self) -> Json:
        """A filter: no admitted group that nobody has claimed and that this limit does not allow."""
        allowed: Json = {"admission.rank": {"$not": {"$gt": self.groups}}}
        if self.after_step is not None:
            allowed["admission.after_step"] = {"$not": {"$gt": self.after_step}}
        return allowed

    def allows(self, admission: Json) -> bool:
        """Return whether a claimer with this limit may claim an admitted group that nobody has claimed."""
        is_current = self.after_step is None or admission["after_step"] <= self.after_step
        return is_current and bool(admission["rank"] <= self.groups)


class AdmissionRacedError(Exception):
    """Another claimer admitted groups at the same moment; nothing was written."""


@dataclass(frozen=True, slots=True)
class _OpenGroups:
    """The open groups of a split: how many, and the admitted ones that nobody has claimed, in order."""

    count: int
    unclaimed: tuple[Json, ...]

    @property
    def claimed(self) -> int:
        return self.count - len(self.unclaimed)

    def has_blocked(self, limit: GroupLimit) -> bool:
        """Return whether ``limit`` allows more claimed groups than there are, and hides an unclaimed one."""
        hidden = any(not limit.allows(group["admission"]) for group in self.unclaimed)
        return hidden and self.claimed < limit.groups


class GroupAdmission(Repository):
    """Counts open groups, and admits new ones up to the limit: the next in order, or by a ``Selection``.

    One transaction admits a batch: the next groups go from created to running with every slot open, and any
    claimer takes these slots by a plain update. So a group may be claimed later than it was admitted, by a
    claimer with a lower limit than the one that admitted it: its engines lag, or its limit is older than the
    last step. That claimer must be allowed itself. An admitted group that nobody has claimed therefore keeps
    its rank among the open groups (``Task.admission``), and a claimer takes it only if the rank is within the
    claimer's own limit. Groups are trained in the order of their ranks, and ranks only fall, so the bound on
    staleness holds for every claimer. The first claim of a slot clears the rank. When ranks have become too
    high, since groups before were trained, the next admission numbers the unclaimed groups anew.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._selection = TaskSelection(connection)

    async def count(self, split: str, session: AsyncClientSession | None = None) -> int:
        """Groups admitted and not yet trained: running, waiting, or finalized with untrained data."""
        admitted = [TaskStatus.RUNNING.value, TaskStatus.WAITING.value]
        running = await self._collection(TASK).count_documents(
            {"split": split, "status": {"$in": admitted}}, session=session
        )
        untrained = {
            "split": split,
            "status": {"$in": [DataStatus.READY.value, DataStatus.PLANNED.value]},
            "trained_count": 0,
        }
        return running + len(await self._collection(DATA).distinct("task", untrained, session=session))

    async def admit(self, split: str, limit: GroupLimit, selection: Selection | None = None) -> bool:
        """Admit the next groups up to ``limit``; True where there may be something to claim now.

        The transaction first writes the gate (``Admission``): of two claimers at once one commits, and the
        other is an AdmissionRacedError. Nobody else can admit while the groups are counted, so the limit is
        exact.
        """
        if limit.groups <= 0:
            return False
        found = await self._open_groups(split)
        if not found.has_blocked(limit) and not await self._any_left(
            split, limit.groups - found.count, selection
        ):
            return False
        async with self._connection.client.start_session() as session:
            try:
                async with await session.start_transaction(
                    read_concern=ReadConcern("snapshot"), write_concern=WriteConcern(w="majority", j=True)
                ):
                    await self._collection(GATE).update_one(
                        {"_id": ADMISSION}, {"$inc": {"opened": 1}}, session=session
                    )
                    if await self._admit(split, limit, selection, session):
                        return True
                    await session.abort_transaction()
                    return False
            except PyMongoError as error:
                if error.has_error_label(_TRANSIENT) or isinstance(error, DuplicateKeyError):
                    raise AdmissionRacedError from error
                raise

    async def _any_left(self, split: str, capacity: int, selection: Selection | None) -> bool:
        if selection is None or capacity <= 0:
            return bool(await self._next_groups(split, capacity))
        return await self._selection.any_left(split, selection)

    async def _admit(
        self, split: str, limit: GroupLimit, selection: Selection | None, session: AsyncClientSession
    ) -> bool:
        step = await self._last_step(session)
        if limit.after_step not in (None, step):
            return False
        found = await self._open_groups(split, session)
        capacity = limit.groups - found.count
        if selection is None:
            groups = await self._next_groups(split, capacity, session)
        else:
            groups = await self._selection.begin(split, selection, capacity, session)
        ranked_before = found.count
        if found.has_blocked(limit):
            groups = [*(group["_id"] for group in found.unclaimed), *groups]
            ranked_before = found.claimed
        if not groups:
            return False
        place = {"$indexOfArray": [slots.literal(groups), "$_id"]}
        admission = {"rank": {"$add": [place, ranked_before + 1]}, "after_step": step}
        fields = {"status": TaskStatus.RUNNING.value, "admission": admission, "updated_at": "$$NOW"}
        await self._collection(TASK).update_many(
            {"_id": {"$in": groups}}, [{"$set": fields}], session=session
        )
        return True

    async def _open_groups(self, split: str, session: AsyncClientSession | None = None) -> _OpenGroups:
        unclaimed = self._collection(TASK).find(
            {"split": split, "admission.rank": {"$gt": 0}},
            {"admission": 1, "epoch": 1, "order": 1, "begun.number": 1},
            sort=[("admission.rank", ASCENDING)], session=session,
        )  # fmt: skip
        ordered = sorted(await unclaimed.to_list(), key=sort_key)
        return _OpenGroups(await self.count(split, session), tuple(ordered))

    async def _next_groups(
        self, split: str, capacity: int, session: AsyncClientSession | None = None
    ) -> Sequence[str]:
        """The ids of the next groups that nobody has admitted: ``capacity`` or ``SLOTS_AT_ONCE`` of slots."""
        if capacity <= 0:
            return []
        created = self._collection(TASK).find(
            {"split": split, "status": TaskStatus.CREATED.value}, {"generations": {"$size": "$slots"}},
            sort=BY_ORDER, limit=min(capacity, SLOTS_AT_ONCE), session=session,
        )  # fmt: skip
        groups: list[str] = []
        total = 0
        async for task in created:
            if total >= SLOTS_AT_ONCE:
                break
            groups.append(task["_id"])
            total += task["generations"]
        return groups

    async def _last_step(self, session: AsyncClientSession) -> int:
        last = await self._collection(STEP).find_one(
            {"status": {"$in": values(APPLIED_STEPS)}},
            {"step": 1},
            sort=[("step", DESCENDING)],
            session=session,
        )
        return 0 if last is None else int(last["step"])
