"""Tasks: loading them, opening their epochs, counting them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Sequence
from typing import Any

from pymongo import ASCENDING
from pymongo.errors import BulkWriteError

from agentrl.documents.base import now
from agentrl.documents.status import TaskStatus
from agentrl.documents.task import Slot, Task, task_key
from agentrl.store.connection import Json, Part, database_call
from agentrl.store.names import TASK
from agentrl.store.task_loading import LoadResult, TaskLoading

_BATCH = 1000
_DUPLICATE = 11000
_UNFINISHED = [status.value for status in TaskStatus if status is not TaskStatus.COMPLETED]


class Tasks(Part):
    """The calls on whole Tasks; their slots are the business of ``Claims``."""

    async def load(self, tasks: Sequence[Task], *, update: bool = False) -> LoadResult:
        """Insert the tasks that are not there yet. Loading the same tasks again changes nothing.

        A task that is there with another text is a TaskFileError; with ``update`` it gets the new one, unless
        somebody has begun it.
        """
        return await TaskLoading(self._connection).load(tasks, update=update)

    @database_call
    async def open_epoch(
        self, split: str, epoch: int, seed: int, num_generations: int, shuffle: bool = True
    ) -> int:
        """Copy the tasks of epoch 0 into ``epoch``, in an order of its own; returns how many were new.

        Any number of callers may do it at once: a task's ``_id`` names its epoch, so each is made once.
        """
        if epoch == 0 or await self._count(split, epoch) == await self._count(split, 0):
            return 0
        query = {"split": split, "epoch": 0}
        cursor = self._collection(TASK).find(query, {"slots": 0, "group": 0}, sort=[("order", ASCENDING)])
        first = [Task.from_document(document) async for document in cursor]
        if shuffle:
            random.Random(f"{seed}/{epoch}").shuffle(first)
        moment = now()
        slots = tuple(Slot(traj_id=number) for number in range(num_generations))
        copies = [
            dataclasses.replace(
                task, id=task_key(split, epoch, task.task_id), epoch=epoch, order=order, slots=slots,
                status=TaskStatus.CREATED, created_at=moment, updated_at=moment,
            )
            for order, task in enumerate(first)
        ]  # fmt: skip
        return await self._insert_missing(copies)

    @database_call
    async def get(self, task_id: str) -> Task | None:
        """The Task with this ``_id`` (split/epoch/id)."""
        document = await self._collection(TASK).find_one({"_id": task_id})
        return None if document is None else Task.from_document(document)

    @database_call
    async def find(
        self, split: str, *, status: TaskStatus | None = None, limit: int = 0, skip: int = 0
    ) -> list[Task]:
        """Tasks in the order in which they are sampled; ``limit`` 0 is all."""
        query: Json = {"split": split} if status is None else {"split": split, "status": status.value}
        cursor = self._collection(TASK).find(
            query, sort=[("epoch", ASCENDING), ("order", ASCENDING)], limit=limit, skip=skip
        )
        return [Task.from_document(document) async for document in cursor]

    @database_call
    async def counts(self, split: str, epoch: int | None = None) -> dict[TaskStatus, int]:
        """How many Tasks are in each state; every state is a key."""
        match: dict[str, Any] = {"split": split} if epoch is None else {"split": split, "epoch": epoch}
        counts = dict.fromkeys(TaskStatus, 0)
        pipeline: list[Json] = [{"$match": match}, {"$group": {"_id": "$status", "count": {"$sum": 1}}}]
        async for group in await self._collection(TASK).aggregate(pipeline):
            counts[TaskStatus(group["_id"])] = group["count"]
        return counts

    @database_call
    async def unfinished(self, split: str) -> int:
        """Tasks whose group is not finalised."""
        return await self._collection(TASK).count_documents({"split": split, "status": {"$in": _UNFINISHED}})

    @database_call
    async def any_in(self, split: str, *states: TaskStatus) -> bool:
        """Whether a Task is in one of these states: cheap, however many there are."""
        query = {"split": split, "status": {"$in": [status.value for status in states]}}
        return await self._collection(TASK).find_one(query, {"_id": 1}) is not None

    @database_call
    async def epochs(self, split: str) -> list[int]:
        """The epochs that have been opened."""
        return sorted(await self._collection(TASK).distinct("epoch", {"split": split}))

    @database_call
    async def places(self, ids: Collection[str]) -> dict[str, tuple[int, int]]:
        """(epoch, order) of these Tasks: the order in which samplers begin them."""
        if not ids:
            return {}
        cursor = self._collection(TASK).find({"_id": {"$in": sorted(ids)}}, {"epoch": 1, "order": 1})
        return {task["_id"]: (task["epoch"], task["order"]) async for task in cursor}

    @database_call
    async def splits(self) -> list[str]:
        """The splits that have tasks."""
        return sorted(await self._collection(TASK).distinct("split"))

    async def _count(self, split: str, epoch: int) -> int:
        return await self._collection(TASK).count_documents({"split": split, "epoch": epoch})

    async def _insert_missing(self, tasks: Sequence[Task]) -> int:
        inserted = 0
        for start in range(0, len(tasks), _BATCH):
            batch = [task.to_document() for task in tasks[start : start + _BATCH]]
            try:
                await self._collection(TASK).insert_many(batch, ordered=False)
                inserted += len(batch)
            except BulkWriteError as error:
                failures = error.details.get("writeErrors", [])
                if any(failure["code"] != _DUPLICATE for failure in failures):
                    raise
                inserted += int(error.details["nInserted"])
        return inserted
