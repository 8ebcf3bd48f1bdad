"""Reopen slots that failed for good, with all their attempts, and groups that could not be finalized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pymongo import ASCENDING
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.documents.task import Slot, Task
from agentrl.scoring.groups import FAILED
from agentrl.store.admin.regroup import Blocker, GroupBlockedError, GroupChange, find_blocker, regroup
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.names import RECORD, TASK

GIVEN_UP = "group"
"""The failure kind of a group that could not be finalized."""
_BEGUN = [TaskStatus.RUNNING.value, TaskStatus.WAITING.value, TaskStatus.COMPLETED.value]
_UNDECIDED: Json = {"group": None, "finalising": None}


@dataclass(slots=True, kw_only=True)
class Reopened:
    """Counts of what was reopened."""

    slots: int = 0
    groups: int = 0
    finalized: int = 0
    """Groups that had been finalized, and are undecided again."""
    data: int = 0
    """Training documents deleted; finalizing the group again makes them anew."""
    given_up: int = 0
    """Groups that could not be finalized, and wait to be finalized again."""
    left: dict[Blocker, int] = field(default_factory=dict)
    """Groups left as they are, by reason."""


class Reopening(Repository):
    """Reopens failed slots and groups of a run."""

    @database_call
    async def reopen(
        self, kinds: Sequence[str] = (), *, split: str | None = None, dry_run: bool = False
    ) -> Reopened:
        """Reopen the failed slots whose last attempt failed with one of ``kinds`` (none: with any).

        One transaction per group. A finalized group is taken back to running, unless a step has planned or
        trained some of its data. A group that could not be finalized (kind ``GIVEN_UP``) waits for it again.
        """
        of_split: Json = {} if split is None else {"split": split}
        done = Reopened()
        failed = {"status": {"$in": _BEGUN}, "slots.status": SlotStatus.FAILED.value, **of_split}
        for task_id in await self._ids(failed):
            await self._reopen_slots(task_id, kinds, done, dry_run)
        if not kinds or GIVEN_UP in kinds:
            given_up = {"status": TaskStatus.COMPLETED.value, "group.outcome": FAILED, **of_split}
            for task_id in await self._ids(given_up):
                done.given_up += dry_run or await self._wait_again({"_id": task_id, **given_up}, done)
        return done

    async def _ids(self, query: Json) -> list[str]:
        tasks = self._collection(TASK).find(query, {"_id": 1}, sort=[("_id", ASCENDING)])
        return [document["_id"] async for document in tasks]

    async def _wait_again(self, query: Json, done: Reopened) -> bool:
        """Move a given-up group back to WAITING; return False if it no longer is one or is blocked."""
        update = {"status": TaskStatus.WAITING.value, "updated_at": "$$NOW", **_UNDECIDED}

        async def write(session: AsyncClientSession) -> bool:
            task = await self._collection(TASK).find_one(query, session=session)
            if task is not None:
                await regroup(self._connection, task, GroupChange(task=[{"$set": update}]), session)
            return task is not None

        try:
            return await self._connection.transaction(write)
        except GroupBlockedError as error:
            _count_left(done, error.blocker)
            return False

    async def _reopen_slots(self, task_id: str, kinds: Sequence[str], done: Reopened, dry_run: bool) -> None:
        async def write(session: AsyncClientSession) -> tuple[int, bool, int]:
            document = await self._collection(TASK).find_one({"_id": task_id}, session=session)
            failed = [] if document is None else await self._failed(document, kinds, session)
            if document is None or not failed:
                return 0, False, 0
            is_final = document["status"] == TaskStatus.COMPLETED.value
            if not dry_run:
                deleted = await regroup(self._connection, document, _reopening(failed), session)
                return len(failed), is_final, deleted
            if is_final and (blocker := await find_blocker(self._connection, task_id, session)) is not None:
                raise GroupBlockedError(blocker)
            return len(failed), is_final, 0

        try:
            opened, was_final, data = await self._connection.transaction(write)
        except GroupBlockedError as error:
            _count_left(done, error.blocker)
            return
        if opened:
            done.slots += opened
            done.groups += 1
            done.finalized += was_final
            done.data += data

    async def _failed(self, task: Json, kinds: Sequence[str], session: AsyncClientSession) -> list[Slot]:
        """Return the failed slots whose last attempt failed with one of ``kinds``."""
        failed = [slot for slot in Task.from_document(task).slots if slot.status is SlotStatus.FAILED]
        if not kinds:
            return failed
        ids = [slot.record_id for slot in failed]
        query = {"_id": {"$in": ids}, "failure.kind": {"$in": list(kinds)}}
        cursor = self._collection(RECORD).find(query, {"_id": 1}, session=session)
        matching = {document["_id"] async for document in cursor}
        return [slot for slot in failed if slot.record_id in matching]


def _reopening(failed: Sequence[Slot]) -> GroupChange:
    """Return the change that opens slots with all their attempts; the group is undecided again."""
    chosen = {"$in": ["$$slot.traj_id", [slot.traj_id for slot in failed]]}
    fields = {
        "status": SlotStatus.OPEN.value, "released": "$$slot.attempt", "not_before": None, "owner": None,
        "lease_expires_at": None,
    }  # fmt: skip
    return GroupChange(task=[*slots.change_slots(chosen, fields), {"$set": _UNDECIDED}])


def _count_left(done: Reopened, blocker: Blocker) -> None:
    done.left[blocker] = done.left.get(blocker, 0) + 1
