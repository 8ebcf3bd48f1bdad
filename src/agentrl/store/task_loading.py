"""Load tasks: insert missing tasks; refuse or, on request, update changed ones."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ParamSpec, TypeVar

import bson
from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from agentrl.documents.base import now, plain
from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.documents.task import CONTENT, Task, task_key
from agentrl.errors import TaskFileError
from agentrl.store.epochs import Epochs, LoadLease
from agentrl.store.mechanics.blobs import CHECKSUMS, sealed
from agentrl.store.mechanics.connection import Connection, Json, Repository
from agentrl.store.names import TASK

P = ParamSpec("P")
R = TypeVar("R")

_BATCH = 1000
_BATCH_BYTES = 8 * 2**20
_DUPLICATE = 11000
_SHOWN = 5
_EXCERPT = 60


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load: ``existing`` tasks were stored before, ``updated`` of them were changed.

    ``left`` are the ids of changed tasks that were not updated because they have been begun.
    """

    inserted: int
    existing: int
    updated: int = 0
    left: tuple[str, ...] = ()


@dataclass(slots=True)
class _Comparison:
    """Indices of the missing and of the changed tasks, and a description of the first differences."""

    missing: array[int] = field(default_factory=lambda: array("Q"))
    changed: array[int] = field(default_factory=lambda: array("Q"))
    differences: list[str] = field(default_factory=list)

    def add(self, index: int, task: Task, stored: Mapping[str, Any] | None) -> None:
        """Compare one task with the stored task of the same id."""
        if stored is None:
            self.missing.append(index)
            return
        differing = list(_differences(stored, task))
        if differing:
            self.changed.append(index)
            if len(self.differences) < _SHOWN:
                self.differences.append(f"{task.id[:_EXCERPT]}: {'; '.join(differing)}")

    def refuse_changed(self) -> None:
        """Raise TaskFileError if a task differs."""
        if not self.changed:
            return
        count = len(self.changed)
        more = f"\n  … and {count - _SHOWN} more" if count > _SHOWN else ""
        raise TaskFileError(
            f"{count} tasks of the file are in the run already, with another text (stored → in the file):\n  "
            + "\n  ".join(self.differences)
            + more,
            hint="load the file that the run was begun with, or use another --run_name (for an evaluation:"
            " another --eval_label); `agentrl tasks load FILE --update` changes tasks that are not begun",
        )

    def refuse_missing(self, tasks: Sequence[Task]) -> None:
        """Raise TaskFileError if a task is missing: the run was begun with another file."""
        if not self.missing:
            return
        shown = ", ".join(tasks[index].id[:_EXCERPT] for index in self.missing[:_SHOWN])
        more = f", … and {len(self.missing) - _SHOWN} more" if len(self.missing) > _SHOWN else ""
        update = f", and --update changes the {len(self.changed)} tasks that differ" if self.changed else ""
        raise TaskFileError(
            f"the run was begun with another file: it does not have {len(self.missing)} tasks of this one:"
            f" {shown}{more}",
            hint=f"`agentrl tasks load FILE --append` adds them{update}; or load the file that the run was"
            " begun with, or use another --run_name (for an evaluation: another --eval_label)",
        )


class TaskLoading(Repository):
    """Loads tasks in batches, so that memory is bounded for any number and size of tasks."""

    def __init__(self, connection: Connection, epochs: Epochs) -> None:
        super().__init__(connection)
        self._epochs = epochs

    async def load(self, tasks: Sequence[Task], *, update: bool = False, append: bool = True) -> LoadResult:
        """Insert the missing tasks; see ``Tasks.load``. If a task is refused, nothing is written."""
        if not tasks:
            return LoadResult(0, 0)
        split, epoch = tasks[0].split, tasks[0].epoch
        compared = await self._compare(tasks, range(len(tasks)))
        is_loaded = await self._epochs.is_loaded(split, epoch)
        if is_loaded and not append:
            compared.refuse_missing(tasks)
        if not update:
            compared.refuse_changed()
        changed = compared.changed[:]
        inserted = 0
        if compared.missing or not is_loaded:
            async with self._epochs.loading(split, epoch) as lease:
                again = await self._compare(tasks, compared.missing)  # another load may have ended
                if not update:
                    again.refuse_changed()
                changed.extend(again.changed)
                inserted = await self._insert_all(tasks, again.missing, lease)
        updated, left = await self._update_all(tasks, changed)
        return LoadResult(inserted, len(tasks) - inserted, updated, left)

    async def _insert_all(self, tasks: Sequence[Task], missing: Sequence[int], lease: LoadLease) -> int:
        await lease.expect(len(missing))
        inserted = 0
        for batch in _batches(tasks, missing):
            inserted += await self._call(self._insert, [task for _, task in batch])
            await lease.renew()
        return inserted

    async def _compare(self, tasks: Sequence[Task], indices: Sequence[int]) -> _Comparison:
        compared = _Comparison()
        if indices and not await self._call(self._has_tasks, tasks[indices[0]]):
            compared.missing.extend(indices)
            return compared
        for batch in _batches(tasks, indices):
            stored = await self._call(self._stored, [task.id for _, task in batch])
            for index, task in batch:
                compared.add(index, task, stored.get(task.id))
        return compared

    async def _update_all(self, tasks: Sequence[Task], changed: Sequence[int]) -> tuple[int, tuple[str, ...]]:
        """Update the tasks at ``changed``; return how many, and the ids of tasks that have been begun."""
        if not changed:
            return 0, ()
        epochs = await self._call(self._begun_epochs, tasks[changed[0]].split)
        left: list[str] = []
        for batch in _batches(tasks, changed):
            left += await self._call(self._update, [task for _, task in batch], epochs)
        return len(changed) - len(left), tuple(left)

    async def _call(self, method: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call one idempotent step of a load; retry it as ``retry_outages`` allows."""
        return await self._connection.call(lambda: method(*args, **kwargs), "tasks: load")

    async def _has_tasks(self, task: Task) -> bool:
        query = {"split": task.split, "epoch": task.epoch}
        return await self._collection(TASK).find_one(query, {"_id": 1}) is not None

    async def _begun_epochs(self, split: str) -> list[int]:
        return sorted(await self._collection(TASK).distinct("epoch", {"split": split}))

    async def _stored(self, ids: Sequence[str]) -> dict[str, Json]:
        shown = {**dict.fromkeys(CONTENT, 1), "slots.traj_id": 1}
        cursor = self._collection(TASK).find({"_id": {"$in": list(ids)}}, shown)
        return {document["_id"]: document async for document in cursor}

    async def _insert(self, tasks: Iterable[Task]) -> int:
        """Insert the tasks that are missing; return how many."""
        documents = [sealed(TASK, task.to_document(), "content") for task in tasks]
        try:
            await self._collection(TASK).insert_many(documents, ordered=False)
        except BulkWriteError as error:
            failures = error.details.get("writeErrors", [])
            if any(failure["code"] != _DUPLICATE for failure in failures):
                raise
            return int(error.details["nInserted"])
        return len(documents)

    async def _update(self, tasks: Sequence[Task], epochs: Sequence[int]) -> list[str]:
        """Update the tasks that have not been begun, in every epoch; return the ids of the other tasks."""
        collection = self._collection(TASK)
        moment = now()
        await collection.bulk_write(
            [UpdateOne(_untouched(task.id), _new_text(task, moment, "slots")) for task in tasks]
            + [UpdateOne(_unbegun(task.id), _new_text(task, moment)) for task in tasks]
        )
        stored = await self._stored([task.id for task in tasks])
        left = [task.id for task in tasks if any(_differences(stored.get(task.id, {}), task))]
        copies = [
            UpdateOne(_unbegun(task_key(task.split, epoch, task.task_id)), _new_text(task, moment))
            for task in tasks
            if task.id not in left
            for epoch in epochs
            if epoch != task.epoch
        ]
        if copies:
            await collection.bulk_write(copies, ordered=False)
        return left


def _batches(tasks: Sequence[Task], indices: Sequence[int]) -> Iterator[list[tuple[int, Task]]]:
    """Yield (index, task) of the tasks at ``indices`` in batches that fit in memory."""
    batch: list[tuple[int, Task]] = []
    size = 0
    for index in indices:
        task = tasks[index]
        added = len(bson.encode(task.to_document()))
        if batch and (len(batch) == _BATCH or size + added > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((index, task))
        size += added
    if batch:
        yield batch


def _differences(stored: Mapping[str, Any], task: Task) -> Iterator[str]:
    """Yield a description of each field that differs: stored → new."""
    for name in CONTENT:
        old, new = stored.get(name), plain(getattr(task, name))
        is_newer = name not in stored and not new  # the run was begun before the field was there
        if old != new and not is_newer:
            yield f"{name} {_excerpt(old)} → {_excerpt(new)}"
    slots = len(stored.get("slots", ()))
    if slots != len(task.slots):
        yield f"num_generations {slots} → {len(task.slots)}"


def _excerpt(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"


def _untouched(task_id: str) -> Json:
    """Return a filter for the Task if no slot has ever been claimed."""
    claimed = {"$elemMatch": {"$or": [{"attempt": {"$gt": 0}}, {"status": {"$ne": SlotStatus.OPEN.value}}]}}
    return {"_id": task_id, "status": TaskStatus.CREATED.value, "slots": {"$not": claimed}}


def _unbegun(task_id: str) -> Json:
    """Return a filter for the Task if no slot is held and every attempt has been released."""
    released = {"$eq": ["$$slot.attempt", {"$ifNull": ["$$slot.released", 0]}]}
    free = {"$and": [{"$eq": ["$$slot.status", SlotStatus.OPEN.value]}, released]}
    every = {"$allElementsTrue": [{"$map": {"input": "$slots", "as": "slot", "in": free}}]}
    states = [TaskStatus.CREATED.value, TaskStatus.RUNNING.value]
    return {"_id": task_id, "status": {"$in": states}, "$expr": every}


def _new_text(task: Task, moment: datetime, *more: str) -> Json:
    document = sealed(TASK, task.to_document(), "content")
    fields = {name: document[name] for name in (*CONTENT, CHECKSUMS, *more)}
    return {"$set": {**fields, "updated_at": moment}}
