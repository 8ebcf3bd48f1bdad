"""Load, find and count Tasks: insert missing ones; refuse or, on request, update changed ones."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from agentrl.base.batches import batches, weighed_batches
from agentrl.documents.document import excerpt, now, plain
from agentrl.documents.run import Withdrawn
from agentrl.documents.status import SlotStatus, TaskStatus, values
from agentrl.documents.task import (
    CONTENT,
    CONVERSATIONS,
    Task,
    fingerprint,
    record_key,
    record_task,
    scorer_weights,
    stored_fingerprint,
    task_key,
)
from agentrl.documents.task_file import FileTasks, MixedTasks
from agentrl.errors import TaskFileError
from agentrl.store.epochs import BY_ORDER, Epochs, sort_key
from agentrl.store.mechanics.blobs import CHECKSUMS, sealed
from agentrl.store.mechanics.connection import (
    TASK,
    TOMBSTONE,
    Connection,
    Json,
    Repository,
    database_call,
    id_prefix,
)

_BATCH = 1000
_BATCH_BYTES = 8 * 2**20
_DUPLICATE = 11000
_SHOWN = 5
_EXCERPT = 60
_UNFINISHED = [status.value for status in TaskStatus if status is not TaskStatus.COMPLETED]


@dataclass(frozen=True, slots=True)
class TaskReferences:
    """What unfinished tasks name: agents, scorers and so on, each with the id of such a task."""

    agents: dict[str, str]
    scorers: dict[str, str]
    answer_schemas: dict[str, str]
    environments: dict[str, str]
    tools: dict[tuple[str, ...], str]
    agent_files: dict[tuple[str | None, str | None], str]
    """(agent_name, agent_cfg_path) → a task; None where the flags say it."""
    smallest_group: int | None
    """The lowest number of generations of a task; None without tasks."""
    images: str | None = None
    """A task that shows images."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load: ``existing`` tasks were stored before, ``updated`` of them were changed.

    ``left`` are the ids of changed tasks that were not updated because they have been begun.
    """

    inserted: int
    existing: int
    updated: int = 0
    left: tuple[str, ...] = ()
    withdrawn: int = 0
    """Tasks that ``agentrl retract`` withdrew; they stay out."""


@dataclass(slots=True)
class _Comparison:
    """Indices of the missing and of the changed tasks, and a description of the first differences."""

    missing: array[int] = field(default_factory=lambda: array("Q"))
    changed: array[int] = field(default_factory=lambda: array("Q"))
    differences: list[str] = field(default_factory=list)

    def add(self, index: int, task: Task, stored: Mapping[str, Any]) -> None:
        """Compare one task with the stored task of the same id."""
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
        listed = "\n  ".join(self.differences)
        more = f"\n  … and {count - _SHOWN} more" if count > _SHOWN else ""
        raise TaskFileError(
            f"{count} tasks of the file are in the run already, with another text (stored → in the file):"
            f"\n  {listed}{more}",
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


class Tasks(Repository):
    """The calls on whole Tasks; ``Claims`` has the calls on their slots."""

    def __init__(self, connection: Connection, epochs: Epochs) -> None:
        super().__init__(connection)
        self._epochs = epochs

    async def load(self, tasks: Sequence[Task], *, update: bool = False, append: bool = True) -> LoadResult:
        """Insert the missing tasks. Idempotent. Memory is bounded for any number and size of tasks.

        Raises TaskFileError if a stored task differs; with ``update``, the stored task is changed unless it
        has been begun. Without ``append``, raises TaskFileError for a task that a loaded split lacks. If a
        task is refused, nothing is written. Waits for another process that loads the split. Tasks that are
        added to epoch 0 are also added to every later epoch.
        """
        if not tasks:
            return LoadResult(0, 0)
        loaded = len(tasks)
        gone = await self._withdrawn(tasks[0].split, tasks[0].epoch)
        tasks = [task for task in tasks if task.id not in gone] if gone else tasks
        if not tasks:
            return LoadResult(0, 0, withdrawn=loaded)
        split, epoch = tasks[0].split, tasks[0].epoch
        # Compare before the lease: each sampler loads its file, and mostly nothing is missing.
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
                await lease.expect(len(again.missing))
                encoded = (_encoded(tasks[index]) for index in again.missing)
                for documents in weighed_batches(encoded, lambda one: len(one.raw), _BATCH_BYTES, _BATCH):
                    inserted += await self._insert(documents)
                    await lease.renew()
        epochs = await self.epochs(split) if changed else []
        left: list[str] = []
        for batch in _batches(tasks, changed):
            left += await self._update([task for _, task in batch], epochs)
        return LoadResult(
            inserted, len(tasks) - inserted, len(changed) - len(left), tuple(left), loaded - len(tasks)
        )

    @database_call
    async def _withdrawn(self, split: str, epoch: int) -> set[str]:
        """Return the ids of the tasks that were withdrawn from an epoch."""
        stones = {"_id": id_prefix(task_key(split, epoch, "")), "kind": Withdrawn.TASK.value}
        return set(await self._ids(TOMBSTONE, stones))

    @database_call
    async def get(self, task_id: str) -> Task | None:
        """Return the Task with this ``_id`` (split/epoch/id); None if it does not exist."""
        return await self._one(Task, TASK, {"_id": task_id})

    @database_call
    async def find(
        self, split: str, *, status: TaskStatus | None = None, limit: int = 0, skip: int = 0
    ) -> list[Task]:
        """Return Tasks in sampling order; ``limit`` 0 returns all."""
        query: Json = {"split": split} if status is None else {"split": split, "status": status.value}
        return await self._all(Task, TASK, query, sort=BY_ORDER, limit=limit, skip=skip)

    @database_call
    async def counts(self, split: str, epoch: int | None = None) -> dict[TaskStatus, int]:
        """Return the number of Tasks per status; every status is a key."""
        match: dict[str, Any] = {"split": split} if epoch is None else {"split": split, "epoch": epoch}
        counts = await self._count_by("status", TASK, match)
        return {status: counts.get(status, 0) for status in TaskStatus}

    @database_call
    async def references(self, split: str) -> TaskReferences:
        """Return the agents, scorers, environments and so on that the unfinished tasks of ``split`` name."""
        fields = ("agent_name", "agent_cfg_path", "scorer", "answer_schema", "environment", "tools")
        unfinished: Json = {"split": split, "status": {"$in": _UNFINISHED}, "epoch": {"$ne": CONVERSATIONS}}
        kinds: Json = {
            "_id": {name: f"${name}" for name in fields},
            "task": {"$min": "$_id"},
            "slots": {"$min": {"$size": "$slots"}},
        }
        groups = await self._aggregate(TASK, {"$match": unfinished}, {"$group": kinds})
        agents, scorer_names, schemas, environments = (
            {group["_id"][name]: group["task"] for group in groups if group["_id"].get(name) is not None}
            for name in ("agent_name", "scorer", "answer_schema", "environment")
        )
        scorers = {part: task for name, task in scorer_names.items() for part in scorer_weights(name)}
        tools = {
            tuple(group["_id"]["tools"]): group["task"]
            for group in groups
            if group["_id"].get("tools") is not None
        }
        agent_files = {
            (group["_id"].get("agent_name"), group["_id"].get("agent_cfg_path")): group["task"]
            for group in groups
        }
        smallest = min((group["slots"] for group in groups), default=None)
        shows = await self._collection(TASK).find_one(
            {**unfinished, "images.0": {"$exists": True}}, {"_id": 1}
        )
        images = None if shows is None else str(shows["_id"])
        return TaskReferences(agents, scorers, schemas, environments, tools, agent_files, smallest, images)

    @database_call
    async def unfinished(self, split: str) -> int:
        """Return how many Tasks have a group that is not finalized."""
        return await self._collection(TASK).count_documents({"split": split, "status": {"$in": _UNFINISHED}})

    @database_call
    async def unfinished_records(self, record_ids: Collection[str]) -> set[str]:
        """Return those of some Records that are sampled now, or that the next claim goes on with."""
        going_on = (SlotStatus.OPEN, SlotStatus.RUNNING)
        tasks = {record_task(key) for key in record_ids}
        query = {"_id": {"$in": sorted(tasks)}, "slots.status": {"$in": values(going_on)}}
        found = {
            record_key(task.id, slot.traj_id, slot.begun)
            for task in await self._all(Task, TASK, query)
            for slot in task.slots
            if slot.status in going_on and slot.begun is not None
        }
        return found & set(record_ids)

    @database_call
    async def any_with_status(self, split: str, *states: TaskStatus, source: str | None = None) -> bool:
        """Return whether a Task, of ``source`` if given, has one of these statuses; reads one document."""
        query: Json = {"split": split, "status": {"$in": values(states)}}
        if source is not None:
            query["source"] = source
        return await self._collection(TASK).find_one(query, {"_id": 1}) is not None

    @database_call
    async def epochs(self, split: str) -> list[int]:
        """Return the epochs that have tasks."""
        return sorted(await self._collection(TASK).distinct("epoch", {"split": split}))

    @database_call
    async def sort_keys(self, ids: Collection[str]) -> dict[str, tuple[int, int, int]]:
        """Return the sort key of each Task in the order of begin: (begin number or 0, epoch, order)."""
        if not ids:
            return {}
        cursor = self._collection(TASK).find(
            {"_id": {"$in": sorted(ids)}}, {"epoch": 1, "order": 1, "begun.number": 1}
        )
        return {task["_id"]: sort_key(task) async for task in cursor}

    @database_call
    async def splits(self) -> list[str]:
        """Return the splits that have tasks."""
        return sorted(await self._collection(TASK).distinct("split"))

    async def _compare(self, tasks: Sequence[Task], indices: Sequence[int]) -> _Comparison:
        compared = _Comparison()
        if indices and not await self._epochs.count(tasks[indices[0]].split, tasks[indices[0]].epoch):
            # Look none up: at the first load that would read the whole file once more.
            compared.missing.extend(indices)
            return compared
        differing = array("Q")
        for some in batches(indices, _BATCH):
            wanted = {index: _fingerprint(tasks, index) for index in some}
            found = await self._fingerprints([key for key, _ in wanted.values()])
            for index, (key, own) in wanted.items():
                if key not in found:
                    compared.missing.append(index)
                elif found[key] != own:
                    differing.append(index)
        for batch in _batches(tasks, differing):
            stored = await self._stored([task.id for _, task in batch])
            for index, task in batch:
                compared.add(index, task, stored.get(task.id, {}))
        return compared

    @database_call
    async def _fingerprints(self, ids: Sequence[str]) -> dict[str, bytes]:
        slots = {"$size": {"$ifNull": ["$slots", []]}}
        shown = {**dict.fromkeys(CONTENT, 1), "slots": slots, "retracted": 1}
        # Hash each as it comes: together they may be large.
        return {
            document["_id"]: stored_fingerprint(document, document["slots"] + document.get("retracted", 0))
            async for document in self._collection(TASK).find({"_id": {"$in": list(ids)}}, shown)
        }

    @database_call
    async def _stored(self, ids: Sequence[str]) -> dict[str, Json]:
        shown = {**dict.fromkeys(CONTENT, 1), "slots.traj_id": 1, "retracted": 1}
        cursor = self._collection(TASK).find({"_id": {"$in": list(ids)}}, shown)
        return {document["_id"]: document async for document in cursor}

    @database_call
    async def _insert(self, documents: Sequence[RawBSONDocument]) -> int:
        """Insert the tasks that are missing; return how many."""
        try:
            # Go on behind duplicates: a batch whose answer was lost in an outage is sent again.
            await self._collection(TASK).insert_many(documents, ordered=False)
        except BulkWriteError as error:
            failures = error.details.get("writeErrors", [])
            if any(failure["code"] != _DUPLICATE for failure in failures):
                raise
            return int(error.details["nInserted"])
        return len(documents)

    @database_call
    async def _update(self, tasks: Sequence[Task], epochs: Sequence[int]) -> list[str]:
        """Update the tasks that have not been begun, in every epoch; return the ids of the other tasks."""
        collection = self._collection(TASK)
        moment = now()
        await collection.bulk_write(
            # Replace slots only where none was claimed: new ones count from 0, which fences no old owner.
            [UpdateOne(_untouched(task.id), _new_text(task, moment, "slots")) for task in tasks]
            + [UpdateOne(_unbegun(task.id), _begun_anew(task, moment)) for task in tasks]
        )
        stored = await self._stored([task.id for task in tasks])
        # Read them back: bulk_write returns how many filters matched, and not which.
        left = [task.id for task in tasks if any(_differences(stored.get(task.id, {}), task))]
        copies = [
            UpdateOne(_unbegun(task_key(task.split, epoch, task.task_id)), _begun_anew(task, moment))
            for task in tasks
            for epoch in epochs
            if task.id not in left and epoch != task.epoch
        ]
        if copies:
            await collection.bulk_write(copies, ordered=False)
        return left


def _batches(tasks: Sequence[Task], indices: Sequence[int]) -> Iterator[list[tuple[int, Task]]]:
    """Yield (index, task) of the tasks at ``indices`` in batches that fit in memory."""
    read = ((index, tasks[index]) for index in indices)
    return weighed_batches(read, lambda each: len(bson.encode(each[1].to_document())), _BATCH_BYTES, _BATCH)


def _encoded(task: Task) -> RawBSONDocument:
    return RawBSONDocument(bson.encode(sealed(TASK, task.to_document(), "content")))


def _fingerprint(tasks: Sequence[Task], index: int) -> tuple[str, bytes]:
    """Return the ``_id`` and the fingerprint of a task; of a file they are known without reading it again."""
    if isinstance(tasks, FileTasks | MixedTasks):
        return tasks.fingerprint(index)
    return tasks[index].id, fingerprint(tasks[index])


def _differences(stored: Mapping[str, Any], task: Task) -> Iterator[str]:
    """Yield a description of each field that differs: stored → new."""
    for name in CONTENT:
        old, new = stored.get(name), plain(getattr(task, name))
        is_newer = name not in stored and not new  # the run was begun before the field was there
        if old != new and not is_newer:
            yield f"{name} {excerpt(old, _EXCERPT)} → {excerpt(new, _EXCERPT)}"
    slots = len(stored.get("slots", ())) + stored.get("retracted", 0)
    if slots != len(task.slots):
        yield f"num_generations {slots} → {len(task.slots)}"


def _untouched(task_id: str) -> Json:
    """Return a filter for the Task if no slot has ever been claimed, and none was withdrawn."""
    claimed = {"$elemMatch": {"$or": [{"attempt": {"$gt": 0}}, {"status": {"$ne": SlotStatus.OPEN.value}}]}}
    whole = {"retracted": {"$not": {"$gt": 0}}}
    return {"_id": task_id, "status": TaskStatus.CREATED.value, "slots": {"$not": claimed}, **whole}


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


def _begun_anew(task: Task, moment: datetime) -> Json:
    """Return the update with the new text of a Task whose released trajectories answer the old one."""
    update = _new_text(task, moment)
    return {"$set": {**update["$set"], "slots.$[].begun": None}}
