"""Read optimizer steps page by page, and the trajectories of one step."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentrl.documents.base import Root
from agentrl.documents.status import APPLIED_STEPS, values
from agentrl.store.connection import Json, Repository, database_call
from agentrl.store.names import RECORD, STEP
from agentrl.store.views.overview import StepPoint

_WITHOUT_DATA: list[Json] = [
    {"$set": {"trajectories": {"$size": "$data"}}},
    {"$unset": ["data", "pending"]},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrajectory(Root):
    """One trajectory that a step trained."""

    id: str
    task: str
    query: str
    score: float | None = None
    advantage: float | None = None
    turns: int = 0
    tool_calls: int = 0
    generated_tokens: int = 0
    min_version: int | None = None
    max_version: int | None = None
    created_at: datetime
    scored_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPage:
    """Some steps, the newest first, and how many there are."""

    steps: tuple[StepPoint, ...]
    total: int


class StepReads(Repository):
    """The reads behind the pages about steps. It never writes."""

    @database_call
    async def page(self, *, skip: int, limit: int) -> StepPage:
        """Return steps of every status, the last planned first."""
        steps = self._collection(STEP)
        stages: list[Json] = [
            {"$sort": {"planned_at": -1, "step": -1}},
            {"$skip": skip},
            {"$limit": limit},
            *_WITHOUT_DATA,
        ]
        cursor = await steps.aggregate(stages)
        found = tuple(StepPoint.from_document(step) for step in await cursor.to_list())
        return StepPage(steps=found, total=await steps.estimated_document_count())

    @database_call
    async def step(self, number: int) -> StepPoint | None:
        """Return the committed step of this number, else the one that was planned last; None without one."""
        steps = self._collection(STEP)
        queries: list[Json] = [{"step": number, "status": {"$in": values(APPLIED_STEPS)}}, {"step": number}]
        for query in queries:
            stages: list[Json] = [
                {"$match": query},
                {"$sort": {"planned_at": -1}},
                {"$limit": 1},
                *_WITHOUT_DATA,
            ]
            found = await (await steps.aggregate(stages)).to_list()
            if found:
                return StepPoint.from_document(found[0])
        return None

    @database_call
    async def trajectories(self, step_id: str) -> list[StepTrajectory]:
        """Return the trajectories of a step whose Records exist, in the step's order."""
        step: Any = await self._collection(STEP).find_one({"_id": step_id}, {"data": 1}) or {"data": []}
        fields = {
            "task": 1, "query": {"$substrCP": ["$query", 0, 300]}, "score": 1, "advantage": 1, "turns": 1,
            "tool_calls": 1, "generated_tokens": 1, "min_version": 1, "max_version": 1, "created_at": 1,
            "scored_at": 1,
        }  # fmt: skip
        cursor = await self._collection(RECORD).aggregate(
            [{"$match": {"_id": {"$in": step["data"]}}}, {"$project": fields}]
        )
        found = {row["_id"]: StepTrajectory.from_document(row) for row in await cursor.to_list()}
        return [found[key] for key in step["data"] if key in found]
