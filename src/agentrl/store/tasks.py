"""Load, find and count Tasks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.documents.status import TaskStatus
from agentrl.documents.task import Task, scorer_weights
from agentrl.store.epochs import Epochs
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.names import TASK
from agentrl.store.selection import BY_ORDER, sort_key
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


class Tasks(Repository):
    """The calls on whole Tasks; ``Claims`` has the calls on their slots."""

    def __init__(self, connection: Connection, epochs: Epochs) -> None:
        super().__init__(connection)
        self._loading = TaskLoading(connection, epochs)

    async def load(self, tasks: Sequence[Task], *, update: bool = False, append: bool = True) -> LoadResult:
        """Insert the missing tasks. Idempotent.

        Raises TaskFileError if a stored task differs; with ``update``, the stored task is changed unless it
        has been begun. Without ``append``, raises TaskFileError for a task that a loaded split lacks. Waits
        for another process that loads the split. Tasks that are added to epoch 0 are also added to every
        later epoch.
        """
        return await self._loading.load(tasks, update=update, append=append)

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
        unfinished: Json = {"split": split, "status": {"$in": _UNFINISHED}}
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
