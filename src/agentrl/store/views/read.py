"""Read a run for people: rows of the audit views, optimizer steps, and whole trajectories."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from agentrl.documents.base import Root
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import APPLIED_STEPS, RecordStatus, StepStatus, values
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.model_calls import read_model_calls
from agentrl.store.names import DATA, RECORD, STEP
from agentrl.store.views import VIEWS
from agentrl.store.views.aggregation import as_is, excerpt
from agentrl.store.views.rows import EngineRow, GroupRow, StepRow, TaskRow, TrajectoryRow

_EXCERPT = 300
_OF_RECORD: Json = {
    **as_is(
        "split", "epoch", "task", "traj_id", "attempt", "status", "score", "advantage", "turns", "tool_calls",
        "generated_tokens", "min_version", "max_version", "created_at", "scored_at",
    ),
    "query": excerpt("query", _EXCERPT),
}  # fmt: skip
R = TypeVar("R", bound=Root)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTrajectory:
    """A trajectory with its model calls, whose texts and tokens are complete."""

    record: Record
    calls: Sequence[DispatchedSamplingTask] = ()
    trained_at_steps: tuple[int, ...] = ()
    failures: Sequence[Record] = ()
    """The failed attempts at the same trajectory, this Record among them or not."""


class Views(Repository):
    """The read path of every screen, the quickstart's report and notebooks. It never writes.

    Rows come from the pipelines of the ``audit_*`` views, run on the collections.
    """

    @database_call
    async def trajectories(
        self,
        *,
        status: str | None = None,
        step: int | None = None,
        split: str | None = None,
        limit: int | None = None,
    ) -> list[TrajectoryRow]:
        """Return trajectories, newest first; ``step`` selects those that a committed step trained."""
        query: Json = {"status": status, "split": split}
        query = {name: value for name, value in query.items() if value is not None}
        if step is not None:
            trained = {"step": step, "status": {"$in": values(APPLIED_STEPS)}}
            query["_id"] = {"$in": await self._data_of(trained)}
        limited: list[Json] = [] if limit is None else [{"$limit": limit}]
        return await self._rows(TrajectoryRow, "audit_trajectories", {"$match": query}, after=limited)

    @database_call
    async def groups(self, *, split: str | None = None) -> list[GroupRow]:
        """Return every Task of every epoch with its scores, in the order of ``_id``."""
        rows = await self._rows(GroupRow, "audit_groups", {"$match": _of_split(split)})
        return sorted(rows, key=lambda row: row.id)

    @database_call
    async def tasks(self, *, split: str | None = None, excerpts: bool = False) -> list[TaskRow]:
        """Return every question that has a completed group, over its epochs, in the order of ``_id``.

        ``excerpts`` cuts questions and leaves out answers, since the texts of a large run fill the memory.
        """
        cut: list[Json] = [{"$set": {"query": excerpt("query", _EXCERPT), "answer": None}}]
        stages = [{"$match": _of_split(split)}, *(cut if excerpts else [])]
        rows = await self._rows(TaskRow, "audit_tasks", *stages)
        return sorted(rows, key=lambda row: row.id)

    @database_call
    async def engines(self) -> list[EngineRow]:
        """Return every engine that has registered, oldest first."""
        rows = await self._rows(EngineRow, "audit_engines")
        return sorted(rows, key=lambda row: row.started_at)

    @database_call
    async def steps(
        self, *, status: StepStatus | Collection[StepStatus] | None = None,
        after: int | None = None, last: int | None = None,
    ) -> list[StepRow]:  # fmt: skip
        """Return the steps above number ``after`` of some or all statuses, as planned; the ``last`` ones."""
        query: Json = {} if after is None else {"step": {"$gt": after}}
        if status is not None:
            query["status"] = {"$in": values([status] if isinstance(status, StepStatus) else status)}
        # the steps of a status are planned in the order of their numbers, which an index has
        order = ("planned_at", "step") if status is None else ("step", "planned_at")
        index = order if status is None else order[:1]
        newest: list[Json] = [{"$sort": dict.fromkeys(index, -1)}, {"$limit": last}]
        rows = await self._rows(StepRow, "audit_steps", {"$match": query}, *(newest if last else []))
        return sorted(rows, key=attrgetter(*order))

    @database_call
    async def steps_page(self, *, skip: int, limit: int) -> tuple[list[StepRow], int]:
        """Return steps of every status, the last planned first, and how many there are."""
        page = ({"$sort": {"planned_at": -1, "step": -1}}, {"$skip": skip}, {"$limit": limit})
        rows = await self._rows(StepRow, "audit_steps", *page)
        return rows, await self._collection(STEP).estimated_document_count()

    @database_call
    async def step(self, number: int) -> StepRow | None:
        """Return the committed step of this number, else the one that was planned last; None without one."""
        rows = await self._rows(StepRow, "audit_steps", {"$match": {"step": number}})
        return max(rows, key=lambda row: (row.status in APPLIED_STEPS, row.planned_at), default=None)

    @database_call
    async def trajectories_of(self, step_id: str) -> list[TrajectoryRow]:
        """Return the trajectories of a step whose Records exist, in its order, without their training."""
        ids = await self._data_of({"_id": step_id})
        cursor = await self._collection(RECORD).aggregate(
            [{"$match": {"_id": {"$in": ids}}}, {"$project": _OF_RECORD}]
        )
        found = {row["_id"]: TrajectoryRow.from_document(row) async for row in cursor}
        return [found[key] for key in ids if key in found]

    @database_call
    async def matching_trajectories(self, part: str, limit: int) -> list[str]:
        """Return the Record id that is ``part``; otherwise up to ``limit`` that begin or end with it."""
        records = self._collection(RECORD)
        if await records.find_one({"_id": part}, {"_id": 1}) is not None:
            return [part]
        literal = re.escape(part)
        query = {"$or": [{"_id": {"$regex": f"^{literal}"}}, {"_id": {"$regex": f"{literal}$"}}]}
        cursor = records.find(query, {"_id": 1}, sort=[("_id", 1)], limit=limit)
        return [document["_id"] async for document in cursor]

    @database_call
    async def whole_trajectory(self, record_id: str) -> WholeTrajectory | None:
        """Return one trajectory with its model calls; None if there is no such Record."""
        records = self._collection(RECORD)
        document = await records.find_one({"_id": record_id})
        if document is None:
            return None
        record = Record.from_document(document)
        attempts = {"task": record.task, "traj_id": record.traj_id, "status": RecordStatus.FAILED.value}
        data = await self._collection(DATA).find_one({"_id": record_id}, {"trained_at_steps": 1})
        return WholeTrajectory(
            record=record,
            calls=(await self.calls([record_id]))[record_id],
            trained_at_steps=tuple(data["trained_at_steps"]) if data else (),
            failures=[
                Record.from_document(failed) async for failed in records.find(attempts, sort=[("attempt", 1)])
            ],
        )

    @database_call
    async def calls(self, record_ids: Sequence[str]) -> dict[str, list[DispatchedSamplingTask]]:
        """Return the model calls of several Records by index, with the texts and tokens that GridFS holds."""
        return await read_model_calls(self._connection, list(record_ids))

    async def _rows(self, row: type[R], view: str, *before: Json, after: Sequence[Json] = ()) -> list[R]:
        """Return the rows of a view; ``before`` runs on the documents, ``after`` on the rows."""
        source, pipeline = VIEWS[view]
        cursor = await self._collection(source).aggregate([*before, *pipeline, *after])
        return [row.from_document(document) async for document in cursor]

    async def _data_of(self, query: Json) -> list[str]:
        """Return the ids of the data of a step."""
        document: Any = await self._collection(STEP).find_one(query, {"data": 1})
        return [] if document is None else document["data"]


def _of_split(split: str | None) -> Json:
    return {} if split is None else {"split": split}
