"""Load, find and count Tasks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import ASCENDING

from agentrl.documents.status import TaskStatus
from agentrl.documents.task import Task, scorer_weights
from agentrl.store.epochs import Epochs
from agentrl.store.mechanics.connection import Json, database_call
from agentrl.store.names import TASK
from agentrl.store.selection import sort_key
from agentrl.store.task_loading import LoadResult, TaskLoading

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


class Tasks(Epochs):
    """The calls on whole Tasks; ``Claims`` has the calls on their slots."""

    async def load(self, tasks: Sequence[Task], *, update: bool = False, append: bool = True) -> LoadResult:
        """Insert the missing tasks. Idempotent.

        Raises TaskFileError if a stored task differs; with ``update``, the stored task is changed unless it
        has been begun. Without ``append``, raises TaskFileError for a task that a loaded split lacks. Waits
        for another process that loads the split. Tasks that are added to epoch 0 are also added to every
        later epoch.
        """
        return await TaskLoading(self._connection, self).load(tasks, update=update, append=append)

    @database_call
    async def get(self, task_id: str) -> Task | None:
        """Return the Task with this ``_id`` (split/epoch/id); None if it does not exist."""
        document = await self._collection(TASK).find_one({"_id": task_id})
        return None if document is None else Task.from_document(document)

    @database_call
    async def find(
        self, split: str, *, status: TaskStatus | None = None, limit: int = 0, skip: int = 0
    ) -> list[Task]:
        """Return Tasks in sampling order; ``limit`` 0 returns all."""
        query: Json = {"split": split} if status is None else {"split": split, "status": status.value}
        cursor = self._collection(TASK).find(
            query, sort=[("epoch", ASCENDING), ("order", ASCENDING)], limit=limit, skip=skip
        )
        return [Task.from_document(document) async for document in cursor]

    @database_call
    async def counts(self, split: str, epoch: int | None = None) -> dict[TaskStatus, int]:
        """Return the number of Tasks per status; every status is a key."""
        match: dict[str, Any] = {"split": split} if epoch is None else {"split": split, "epoch": epoch}
        counts = dict.fromkeys(TaskStatus, 0)
        pipeline: list[Json] = [{"$match": match}, {"$group": {"_id": "$status", "count": {"$sum": 1}}}]
        async for group in await self._collection(TASK).aggregate(pipeline):
            counts[TaskStatus(group["_id"])] = group["count"]
        return counts

    @database_call
    async def references(self, split: str) -> TaskReferences:
        """Return the agents, scorers, environments and so on that the unfinished tasks of ``split`` name."""
        fields = ("agent_name", "agent_cfg_path", "scorer", "answer_schema", "environment", "tools")
        pipeline: list[Json] = [
            {"$match": {"split": split, "status": {"$in": _UNFINISHED}}},
            {
                "$group": {
                    "_id": {name: f"${name}" for name in fields},
                    "task": {"$min": "$_id"},
                    "slots": {"$min": {"$size": "$slots"}},
                }
            },
        ]
        groups = [group async for group in await self._collection(TASK).aggregate(pipeline)]
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
        shown = {"split": split, "status": {"$in": _UNFINISHED}, "images.0": {"$exists": True}}
        found = await self._collection(TASK).find_one(shown, {"_id": 1})
        images = None if found is None else str(found["_id"])
        return TaskReferences(agents, scorers, schemas, environments, tools, agent_files, smallest, images)

    @database_call
    async def unfinished(self, split: str) -> int:
        """Return how many Tasks have a group that is not finalized."""
        return await self._collection(TASK).count_documents({"split": split, "status": {"$in": _UNFINISHED}})

    @database_call
    async def any_with_status(self, split: str, *states: TaskStatus) -> bool:
        """Return whether a Task has one of these statuses; reads at most one document."""
        query = {"split": split, "status": {"$in": [status.value for status in states]}}
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
