"""Reopen slots that failed for good, and queue what has no score: their groups are undecided again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pymongo import UpdateOne

from agentrl.documents.status import ColumnStatus, RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import CONVERSATIONS, FEEDBACK
from agentrl.scoring.groups import FAILED
from agentrl.store.admin.regroup import (
    Blocker,
    GroupBlockedError,
    GroupChange,
    regroup,
    require_unblocked,
    selection,
)
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.mechanics.lease import after
from agentrl.store.names import COLUMN, RECORD, TASK

GIVEN_UP = "group"
"""The failure kind of a group that could not be finalized."""
COLUMN_KIND = "column"
"""The failure kind of a column that was given up."""
_BEGUN = [TaskStatus.RUNNING.value, TaskStatus.WAITING.value, TaskStatus.COMPLETED.value]
_UNDECIDED: Json = {"group": None, "finalizing": None}


@dataclass(slots=True, kw_only=True)
class Reopened:
    """Counts of what was reopened."""

    slots: int = 0
    groups: int = 0
    finalized: int = 0
    """Groups that had been finalized, and are undecided again."""
    data: int = 0
    """Training documents deleted; finalizing the group again makes them anew."""
    columns: int = 0
    """Columns that were given up, and wait to be filled again."""
    given_up: int = 0
    """Groups that could not be finalized, and wait to be finalized again."""
    conversations: int = 0
    """Conversations that wait for feedback again."""
    left: Counter[Blocker] = field(default_factory=Counter)
    """Groups left as they are, by reason."""


@dataclass(slots=True, kw_only=True)
class Requeued:
    """Counts of the trajectories that wait for a score again."""

    by_split: Counter[str] = field(default_factory=Counter)
    left: Counter[Blocker] = field(default_factory=Counter)
    """Groups left as they are, by reason."""


class Reopening(Repository):
    """Reopens slots and groups of a run: one transaction per group.

    A finalized group is taken back to running, unless a step has planned or trained some of its data.
    """

    @database_call
    async def reopen(
        self, kinds: Sequence[str] = (), *, split: str | None = None, feedback_hours: float = 72.0,
        dry_run: bool = False,
    ) -> Reopened:  # fmt: skip
        """Reopen the failed slots whose last attempt failed with one of ``kinds`` (none: with any).

        They get all their attempts. A conversation that nobody rated (kind ``FEEDBACK``) waits for feedback
        again, ``feedback_hours`` from now; other conversations stay. A group that could not be finalized
        (kind ``GIVEN_UP``) waits for it again, and one with columns that were given up (kind ``COLUMN_KIND``)
        waits for these again.
        """
        of_split: Json = {} if split is None else {"split": split}
        done = Reopened()
        failed = {"status": {"$in": _BEGUN}, "slots.status": SlotStatus.FAILED.value, **of_split}
        for task_id in sorted(await self._ids(TASK, {**failed, "epoch": {"$ne": CONVERSATIONS}})):
            records = None if not kinds else {"task": task_id, "failure.kind": {"$in": list(kinds)}}
            if changed := await self._change(task_id, records, _opening, done.left, dry_run):
                done.slots += changed.slots
                done.groups += 1
                done.finalized += changed.task["status"] == TaskStatus.COMPLETED.value
                done.data += changed.data
        await self._reopen_conversations(failed, kinds, feedback_hours, done, dry_run)
        if not kinds or GIVEN_UP in kinds:
            given_up = {"status": TaskStatus.COMPLETED.value, "group.outcome": FAILED, **of_split}
            for task_id in sorted(await self._ids(TASK, given_up)):
                done.given_up += dry_run or await self._wait_again({"_id": task_id, **given_up}, done)
        if not kinds or COLUMN_KIND in kinds:
            await self._reopen_columns(of_split, done, dry_run)
        return done

    @database_call
    async def requeue(
        self, *, split: str | None = None, tasks: Sequence[str] = (), records: Sequence[str] = (),
        dry_run: bool = False,
    ) -> Requeued:  # fmt: skip
        """Queue the sampled Records that failed for good in scoring, with all attempts to score them."""
        query: Json = {
            "status": RecordStatus.FAILED.value, "failure.kind": "scorer", "completed_at": {"$ne": None},
            "pruned_at": None, **selection(split, tasks, records),
        }  # fmt: skip
        done = Requeued()
        for task_id in sorted(await self._collection(RECORD).distinct("task", query)):
            chosen = {**query, "task": task_id}
            if changed := await self._change(task_id, chosen, _queueing, done.left, dry_run):
                done.by_split[changed.task["split"]] += changed.slots
        return done

    async def _reopen_conversations(
        self, failed: Json, kinds: Sequence[str], hours: float, done: Reopened, dry_run: bool
    ) -> None:
        """Let those that only lack feedback wait for it; count the others."""
        waiting = partial(_queueing, not_before=after(hours * 3600))
        for task_id in sorted(await self._ids(TASK, {**failed, "epoch": CONVERSATIONS})):
            of_kind: Json = {"failure.kind": {"$in": list(kinds)}} if kinds else {}
            query = {"task": task_id, "status": RecordStatus.FAILED.value, **of_kind}
            record = await self._collection(RECORD).find_one(query)
            if record is None:
                continue
            is_whole = record["completed_at"] is not None and record["pruned_at"] is None
            lacks = is_whole and record["failure"]["kind"] == FEEDBACK
            if lacks and await self._change(task_id, {"_id": record["_id"]}, waiting, done.left, dry_run):
                done.conversations += 1
            else:
                done.left[Blocker.CONVERSATION] += 1

    async def _reopen_columns(self, of_split: Json, done: Reopened, dry_run: bool) -> None:
        """Open the columns that were given up; their groups wait for them."""
        columns = self._collection(COLUMN)
        failed: Json = {"status": ColumnStatus.FAILED.value, **of_split}
        for task_id in sorted(await columns.distinct("task", failed)):
            of_task = {**failed, "task": task_id}
            count = await columns.count_documents(of_task)
            if dry_run or await self._wait_again({"_id": task_id}, done, of_task):
                done.columns += count

    async def _wait_again(self, query: Json, done: Reopened, columns: Json | None = None) -> bool:
        """Move a group back to WAITING and open its ``columns``; return False if it is gone or blocked."""
        opened = {"status": ColumnStatus.OPEN.value, "failures": 0, "not_before": None}
        update = {"status": TaskStatus.WAITING.value, "updated_at": "$$NOW", **_UNDECIDED}

        async def write() -> bool:
            task = await self._collection(TASK).find_one(query)
            if task is not None:
                await regroup(self._connection, task, GroupChange(task=[{"$set": update}]))
                if columns is not None:
                    await self._collection(COLUMN).update_many(columns, {"$set": opened})
            return task is not None

        try:
            return await self._connection.transaction(write)
        except GroupBlockedError as error:
            done.left[error.blocker] += 1
            return False

    async def _change(
        self, task_id: str, records: Json | None, change: Callable[[Sequence[Json]], GroupChange],
        left: Counter[Blocker], dry_run: bool,
    ) -> _Changed | None:  # fmt: skip
        """Change the failed slots of a group whose Record is among ``records`` (None: all of them).

        None if there is none, and for a group that cannot be taken back, which ``left`` counts.
        """

        async def write() -> _Changed | None:
            task = await self._collection(TASK).find_one({"_id": task_id})
            if task is None:
                return None
            failed = [slot for slot in task["slots"] if slot["status"] == SlotStatus.FAILED]
            if records is not None:
                chosen = await self._ids(RECORD, records)
                failed = [slot for slot in failed if slot.get("record_id") in chosen]
            if not failed:
                return None
            if not dry_run:
                deleted = await regroup(self._connection, task, change(failed))
                return _Changed(task, len(failed), deleted)
            if task["status"] == TaskStatus.COMPLETED:
                await require_unblocked(self._connection, task_id)
            return _Changed(task, len(failed), 0)

        try:
            return await self._connection.transaction(write)
        except GroupBlockedError as error:
            left[error.blocker] += 1
            return None


class _Changed(NamedTuple):
    task: Json
    """As it was before."""
    slots: int
    data: int
    """Training documents that were deleted."""


def _opening(failed: Sequence[Json]) -> GroupChange:
    """Return the change that opens slots with all their attempts; the group is undecided again."""
    chosen = {"$in": ["$$slot.traj_id", [slot["traj_id"] for slot in failed]]}
    return GroupChange(task=[*slots.change_slots(chosen, slots.REOPENED), {"$set": _UNDECIDED}])


def _queueing(failed: Sequence[Json], not_before: Json | None = None) -> GroupChange:
    """Return the change that queues failed slots for a score; the group is undecided again."""
    chosen = {"$in": ["$$slot.traj_id", [slot["traj_id"] for slot in failed]]}
    records = [
        UpdateOne(
            {"_id": slot["record_id"], "status": RecordStatus.FAILED.value},
            {"$set": {"status": RecordStatus.COMPLETED.value, "failure": None}},
        )
        for slot in failed
    ]
    update = slots.change_slots(chosen, {**slots.QUEUED, "scorings": 0, "not_before": not_before})
    return GroupChange(task=[*update, {"$set": _UNDECIDED}], records=records)
