"""Take a finalized group back and decide it anew, in one transaction, while nothing of it is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pymongo import UpdateOne

from agentrl.documents.base import plain
from agentrl.documents.record import Record
from agentrl.documents.status import DataStatus, RecordStatus, TaskStatus
from agentrl.documents.task import Begin, Task
from agentrl.errors import StoreError
from agentrl.store.groups import Decide, GroupOutcome, read_group, settle_records
from agentrl.store.mechanics.blobs import Blobs
from agentrl.store.mechanics.connection import Connection, Json
from agentrl.store.mechanics.lease import literal
from agentrl.store.names import DATA, RECORD, TASK
from agentrl.store.selection import ease_after_group

DecideTask = Callable[[Task], Decide | None]
"""A finalized Task → the function that decides its group; None if its rules are unknown."""

R = TypeVar("R")
_TRIES = 5
_CONSUMED = [DataStatus.PLANNED.value, DataStatus.TRAINED.value]
_SETTLED = [RecordStatus.READY.value, RecordStatus.ABANDONED.value]


class Blocker(StrEnum):
    """Why a group is left as it is; all but the last are about finalized groups."""

    TRAINED = "trained"  # a step has trained, or has planned to train, some of its data
    PRUNED = "pruned"  # model calls of its scored trajectories have been deleted
    NO_RULES = "no rules"  # it does not store the rules by which it was decided
    CONVERSATION = "conversation"  # its user is gone: nobody can sample it again


def selection(split: str | None, tasks: Sequence[str], records: Sequence[str]) -> Json:
    """Return the filter of a command's Records: None and empty sequences select all."""
    query: Json = {}
    if split is not None:
        query["split"] = split
    if tasks:
        query["task"] = {"$in": list(tasks)}
    if records:
        query["_id"] = {"$in": list(records)}
    return query


class GroupChangedError(Exception):
    """Another process changed the group since it was read: read it again and retry."""


class GroupBlockedError(Exception):
    """The group is finalized and cannot be taken back."""

    def __init__(self, blocker: Blocker) -> None:
        super().__init__(blocker)
        self.blocker = blocker


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """The changes to a group, as aggregation updates."""

    task: Sequence[Json]
    records: Sequence[UpdateOne] = ()
    """Changes of single Records, each of which must match."""
    outcome: GroupOutcome | None = None
    """The new decision on a finalized group; None: it is undecided until its slots are terminal again."""


async def retry_changed(change: Callable[[], Awaitable[R]], task_id: str, *, doing: str, hint: str) -> R:
    """Call ``change``, which reads and writes a group, again while other processes change it meanwhile."""
    for _ in range(_TRIES):
        with contextlib.suppress(GroupChangedError, GroupBlockedError):
            return await change()
    raise StoreError(f"group {task_id} kept changing while it was {doing}", hint=hint)


async def decide_anew(
    connection: Connection, task: Json, records: Sequence[Record], decide_by: DecideTask
) -> GroupOutcome | Blocker:
    """Return the decision on a finalized group that has ``records`` now, or why it keeps the old one."""
    if (blocker := await _find_blocker(connection, task["_id"])) is not None:
        return blocker
    parsed = Task.from_document(task)
    decide = decide_by(parsed)
    return Blocker.NO_RULES if decide is None else decide(await read_group(connection, parsed, records))


async def regroup(connection: Connection, task: Json, change: GroupChange) -> int:
    """Change a group; one that is finalized is taken back first, and decided anew by ``change.outcome``.

    Taking back deletes its training data and moves its Records back to SCORED. Returns the number of deleted
    training documents. Raises GroupChangedError if ``task`` is not as it was read, or GroupBlockedError: each
    aborts the transaction.
    """
    task_id = task["_id"]
    await change_task(connection, task, change.task)
    if change.records:
        written = await connection.collection(RECORD).bulk_write(list(change.records))
        if written.matched_count != len(change.records):
            raise GroupChangedError
    if task["status"] != TaskStatus.COMPLETED.value:
        return 0
    await require_unblocked(connection, task_id)
    deleted = await _take_back(connection, task_id)
    if change.outcome is not None:
        await settle_records(connection, change.outcome.records)
        blobs = Blobs(connection, DATA)
        for item in change.outcome.data:
            document = await blobs.rewrite(item.to_document())
            await connection.collection(DATA).insert_one(document)
    return deleted


async def change_task(connection: Connection, task: Json, change: Sequence[Json]) -> None:
    """Update a Task. Raises GroupChangedError if it is not as it was read."""
    unchanged = {key: task[key] for key in ("_id", "status", "updated_at")}
    updated = await connection.collection(TASK).update_one(unchanged, list(change))
    if not updated.matched_count:
        raise GroupChangedError


def decided(task: Json, outcome: GroupOutcome) -> Json:
    """Return the fields of a Task, as expressions, that a new decision changes; the group keeps its times."""
    gone = ("problem", "kept_as_trained")
    kept = {key: value for key, value in (task["group"] or {}).items() if key not in gone}
    changes: Json = {"group": literal({**kept, **plain(outcome.summary)}), "updated_at": "$$NOW"}
    if task.get("begun") and task.get("ease") is not None:
        changes["ease"] = ease_after_group(Begin.from_document(task["begun"]), outcome.summary)
    return changes


async def require_unblocked(connection: Connection, task_id: str) -> None:
    """Raise GroupBlockedError if a finalized group cannot be taken back."""
    if (blocker := await _find_blocker(connection, task_id)) is not None:
        raise GroupBlockedError(blocker)


async def _find_blocker(connection: Connection, task_id: str) -> Blocker | None:
    """Return why a finalized group cannot be taken back; None if it can."""
    consumed = {"$or": [{"status": {"$in": _CONSUMED}}, {"trained_count": {"$gt": 0}}]}
    data = connection.collection(DATA)
    if await data.find_one({"task": task_id, **consumed}, {"_id": 1}):
        return Blocker.TRAINED
    pruned = {"task": task_id, "score": {"$ne": None}, "pruned_at": {"$ne": None}}
    if await connection.collection(RECORD).find_one(pruned, {"_id": 1}):
        return Blocker.PRUNED
    return None


async def _take_back(connection: Connection, task_id: str) -> int:
    """Delete the group's training data with their files, and move its Records back to SCORED.

    A step planned at the same moment writes the same documents, so that one of the two transactions retries.
    """
    data = connection.collection(DATA)
    ids = [item["_id"] async for item in data.find({"task": task_id}, {"_id": 1})]
    if ids:
        await data.delete_many({"_id": {"$in": ids}})
        await Blobs(connection, DATA).delete(ids)
    scored: Json = {
        "status": RecordStatus.SCORED.value, "advantage": None, "turn_advantages": [],
        "abandoned_because": None,
    }  # fmt: skip
    await connection.collection(RECORD).update_many(
        {"task": task_id, "status": {"$in": _SETTLED}}, {"$set": scored}
    )
    return len(ids)
