"""Slots that failed for good, opened again with all their attempts; finalized groups too, while untrained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pymongo import ASCENDING
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import Slot, Task
from agentrl.scoring.groups import FAILED
from agentrl.store import slots
from agentrl.store.admin.regroup import Blocker, blocker, drop_data
from agentrl.store.connection import Json, Repository, database_call
from agentrl.store.names import RECORD, TASK

GIVEN_UP = "group"
"""The kind of failure of a group that could not be finalized."""
_BEGUN = [TaskStatus.RUNNING.value, TaskStatus.WAITING.value, TaskStatus.COMPLETED.value]


@dataclass(slots=True, kw_only=True)
class Reopened:
    """What was opened. ``finalized`` of the ``groups`` had been decided and are undecided again."""

    slots: int = 0
    groups: int = 0
    finalized: int = 0
    data: int = 0
    """Training documents deleted: they are made anew when the group is complete again."""
    given_up: int = 0
    """Groups that could not be finalized, and wait to be finalized again."""
    left: dict[Blocker, int] = field(default_factory=dict)
    """Groups left as they are, by what forbade it."""


class Reopening(Repository):
    """``agentrl db reopen``."""

    @database_call
    async def reopen(
        self, kinds: Sequence[str] = (), *, split: str | None = None, dry_run: bool = False
    ) -> Reopened:
        """Open the failed slots whose last attempt failed with one of ``kinds`` (none: with any).

        One transaction a group. A finalized group goes back to running, its scored Records to ``scored``,
        and its training data are deleted; that of which a step has trained anything stays as it is. A group
        that could not be finalized (kind ``GIVEN_UP``) waits to be finalized again.
        """
        query: Json = {"status": {"$in": _BEGUN}, "slots.status": SlotStatus.FAILED.value}
        if split is not None:
            query["split"] = split
        done = Reopened()
        tasks = self._collection(TASK).find(query, {"_id": 1}, sort=[("_id", ASCENDING)])
        for task_id in [document["_id"] async for document in tasks]:
            await self._reopen_group(task_id, kinds, done, dry_run)
        if not kinds or GIVEN_UP in kinds:
            given_up: Json = {"status": TaskStatus.COMPLETED.value, "group.outcome": FAILED}
            if split is not None:
                given_up["split"] = split
            tasks = self._collection(TASK).find(given_up, {"_id": 1}, sort=[("_id", ASCENDING)])
            for task_id in [document["_id"] async for document in tasks]:
                done.given_up += await self._wait_again(task_id, dry_run)
        return done

    async def _wait_again(self, task_id: str, dry_run: bool) -> bool:
        """Move a group that was given up back to WAITING, its Records to SCORED."""
        if dry_run:
            return True

        async def write(session: AsyncClientSession) -> bool:
            moved = await self._collection(TASK).update_one(
                {"_id": task_id, "status": TaskStatus.COMPLETED.value, "group.outcome": FAILED},
                {
                    "$set": {"status": TaskStatus.WAITING.value, "group": None, "finalising": None},
                    "$currentDate": {"updated_at": True},
                },
                session=session,
            )
            if moved.matched_count:
                await self._unsettle(task_id, session)
            return bool(moved.matched_count)

        return await self._connection.transaction(write)

    async def _reopen_group(self, task_id: str, kinds: Sequence[str], done: Reopened, dry_run: bool) -> None:
        async def write(session: AsyncClientSession) -> tuple[int, bool, int, Blocker | None]:
            document = await self._collection(TASK).find_one({"_id": task_id}, session=session)
            if document is None:
                return 0, False, 0, None
            task = Task.from_document(document)
            failed = await self._failed(task, kinds, session)
            if not failed:
                return 0, False, 0, None
            if task.status is not TaskStatus.COMPLETED:
                if not dry_run:
                    await self._open(task_id, failed, session)
                return len(failed), False, 0, None
            forbidden = await blocker(self._connection, task_id, session)
            if forbidden is not None or dry_run:
                return len(failed), True, 0, forbidden
            await self._open(task_id, failed, session)
            await self._unsettle(task_id, session)
            return len(failed), True, await drop_data(self._connection, task_id, session), None

        opened, was_final, data, forbidden = await self._connection.transaction(write)
        if forbidden is not None:
            done.left[forbidden] = done.left.get(forbidden, 0) + 1
        elif opened:
            done.slots += opened
            done.groups += 1
            done.finalized += was_final
            done.data += data

    async def _failed(self, task: Task, kinds: Sequence[str], session: AsyncClientSession) -> list[Slot]:
        failed = [slot for slot in task.slots if slot.status is SlotStatus.FAILED]
        if not kinds:
            return failed
        ids = [slot.record_id for slot in failed]
        query = {"_id": {"$in": ids}, "failure.kind": {"$in": list(kinds)}}
        cursor = self._collection(RECORD).find(query, {"_id": 1}, session=session)
        matching = {document["_id"] async for document in cursor}
        return [slot for slot in failed if slot.record_id in matching]

    async def _open(self, task_id: str, failed: Sequence[Slot], session: AsyncClientSession) -> None:
        chosen = {"$in": ["$$slot.traj_id", [slot.traj_id for slot in failed]]}
        fields = {
            "status": SlotStatus.OPEN.value, "released": "$$slot.attempt", "not_before": None,
            "owner": None, "lease_expires_at": None,
        }  # fmt: skip
        update = [*slots.change_slots(chosen, fields), {"$set": {"group": None, "finalising": None}}]
        await self._collection(TASK).update_one({"_id": task_id}, update, session=session)

    async def _unsettle(self, task_id: str, session: AsyncClientSession) -> None:
        settled = [RecordStatus.READY.value, RecordStatus.ABANDONED.value]
        await self._collection(RECORD).update_many(
            {"task": task_id, "status": {"$in": settled}},
            {"$set": {"status": RecordStatus.SCORED.value, "advantage": None, "abandoned_because": None}},
            session=session,
        )
