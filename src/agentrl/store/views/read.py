"""Read a run for people: rows of the audit views, whole trajectories, and the state of the run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from agentrl.documents.base import Root, now
from agentrl.documents.evaluation import Evaluation
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.outage import Outage
from agentrl.documents.record import Record
from agentrl.documents.run import RunSettings
from agentrl.documents.serving import PolicyVersion
from agentrl.documents.status import APPLIED_STEPS, TRAINED, RecordStatus, StepStatus, TaskStatus, values
from agentrl.store.connection import Json, Repository, database_call
from agentrl.store.evaluations import Evaluations
from agentrl.store.model_calls import read_model_calls
from agentrl.store.names import DATA, RECORD, STEP, TASK, VERSION
from agentrl.store.outages import OutageRecords
from agentrl.store.selection import ORDER
from agentrl.store.services import Services
from agentrl.store.settings import Settings
from agentrl.store.views import VIEWS
from agentrl.store.views.failures import Failures
from agentrl.store.views.rows import (
    DataCount,
    EngineRow,
    EnvironmentCount,
    FailureCount,
    GroupCount,
    GroupRow,
    LengthBias,
    PromptTokens,
    StepRow,
    TaskRow,
    TrajectoryRow,
)

LAST_STEPS = 10
LAST_VERSIONS = 5
LAST_EVALUATIONS = 5
PAST_OUTAGES = 5
_TRAIN = "train"
_BY_ID: Json = {"$sort": {"_id": 1}}
_IS_TRAINED: Json = {"$and": [{"$eq": ["$status", RecordStatus.READY.value]}, {"$gt": ["$trained_count", 0]}]}
_SHOWN_STATUS: Json = {"$cond": [_IS_TRAINED, TRAINED, "$status"]}
R = TypeVar("R", bound=Root)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTrajectory:
    """A trajectory with its model calls, whose texts and tokens are complete."""

    record: Record
    calls: Sequence[DispatchedSamplingTask] = ()
    trained_at_steps: tuple[int, ...] = ()
    failures: Sequence[Record] = ()
    """The failed attempts at the same trajectory, this Record among them or not."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The contents of ``agentrl audit run``."""

    run_name: str
    tasks: Mapping[str, Mapping[str, int]]
    """``split, epoch`` → status → Tasks."""
    records: Mapping[str, Mapping[str, int]]
    """split → status as people read it (``SHOWN_STATUSES``) → Records."""
    failures: Sequence[FailureCount]
    groups: Sequence[GroupCount]
    data: Sequence[DataCount]
    lengths: Sequence[LengthBias]
    prompts: Sequence[PromptTokens]
    samplers: Mapping[str, int]
    """sampler → slots of the train split that it holds under live leases."""
    outages: Sequence[Outage]
    """What samplers find down now."""
    past_outages: Sequence[Outage] = ()
    """What was down, the latest first."""
    waiting_for_score: int
    """Number of sampled trajectories of the train split in the queue for a score."""
    engines: Sequence[EngineRow]
    versions: Sequence[PolicyVersion]
    """The newest ones, newest first, without their files."""
    steps: Sequence[StepRow]
    """The last ones, oldest first."""
    settings: Sequence[RunSettings]
    """The settings that the processes of the run agree on."""
    configurations: Sequence[RunSettings]
    """The resolved configuration of each role."""
    environments: Sequence[EnvironmentCount] = ()
    evaluations: Sequence[Evaluation] = ()
    """The newest ones, newest first."""
    at: datetime

    @property
    def empty(self) -> bool:
        """Whether the database holds nothing of a run."""
        return not (self.tasks or self.records or self.engines or self.versions or self.steps)


class Views(Repository):
    """The read path of the audit pages, the quickstart's report and notebooks. It never writes.

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
            query["_id"] = {"$in": await self._trained_by(step)}
        return await self._rows(TrajectoryRow, "audit_trajectories", query, limit=limit)

    @database_call
    async def groups(self, *, split: str | None = None) -> list[GroupRow]:
        """Return every Task of every epoch with its scores, in the order of ``_id``."""
        query = {} if split is None else {"split": split}
        rows = await self._rows(GroupRow, "audit_groups", query)
        return sorted(rows, key=lambda row: row.id)

    @database_call
    async def tasks(self, *, split: str | None = None) -> list[TaskRow]:
        """Return every question that has a completed group, over its epochs, in the order of ``_id``."""
        query = {} if split is None else {"split": split}
        rows = await self._rows(TaskRow, "audit_tasks", query)
        return sorted(rows, key=lambda row: row.id)

    @database_call
    async def steps(self, *, status: StepStatus | None = None, last: int | None = None) -> list[StepRow]:
        """Return optimizer steps in the order in which they were planned; ``last`` limits their number."""
        source, pipeline = VIEWS["audit_steps"]
        stages: list[Json] = [] if status is None else [{"$match": {"status": status.value}}]
        if last is not None:
            stages += [{"$sort": {"planned_at": -1, "step": -1}}, {"$limit": last}]
        rows = [StepRow.from_document(row) for row in await self._aggregate(source, *stages, *pipeline)]
        return sorted(rows, key=lambda row: (row.planned_at, row.step))

    @database_call
    async def engines(self) -> list[EngineRow]:
        """Return every engine that has registered, oldest first."""
        rows = await self._rows(EngineRow, "audit_engines", {})
        return sorted(rows, key=lambda row: row.started_at)

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

    @database_call
    async def group_counts(self) -> list[GroupCount]:
        """Count the finalized groups of the train split: those begun by order, those begun by pass rate."""
        abandoned = {"$cond": [{"$eq": ["$group.trained", 0]}, 1, 0]}
        groups = await self._aggregate(
            TASK,
            {"$match": {"split": _TRAIN, "status": TaskStatus.COMPLETED.value}},
            {
                "$group": {
                    "_id": {"$ifNull": ["$begun.by", ORDER]},
                    "groups": {"$sum": 1},
                    "abandoned_groups": {"$sum": abandoned},
                    "trajectories": {"$sum": "$group.scored"},
                    "trained": {"$sum": "$group.trained"},
                    "pass_rate": {"$avg": "$group.pass_rate"},
                }
            },
            _BY_ID,
        )
        return [GroupCount(by=group.pop("_id"), **group) for group in groups]

    @database_call
    async def state(self) -> RunState:
        """Return the state of the run."""
        epoch = {"$concat": ["$split", ", epoch ", {"$toString": "$epoch"}]}
        newest = self._collection(VERSION).find({}, {"files": 0}, sort=[("_id", -1)], limit=LAST_VERSIONS)
        tasks = await self._by_status(TASK, epoch)
        liveness = await Services(self._connection).liveness(_TRAIN, 0.0)
        failures = Failures(self._connection)
        return RunState(
            run_name=self._connection.database.name,
            tasks=tasks,
            records=await self._by_status(RECORD, "$split", _SHOWN_STATUS),
            failures=[*await failures.attempts(), *await failures.groups()],
            groups=await self.group_counts(),
            data=await self._data(),
            lengths=await self._lengths(),
            prompts=await self._prompts(),
            samplers=liveness.claims,
            outages=liveness.outages,
            past_outages=await OutageRecords(self._connection).past(PAST_OUTAGES),
            waiting_for_score=liveness.waiting_for_score,
            engines=await self.engines(),
            versions=[PolicyVersion.from_document({**version, "files": ()}) async for version in newest],
            steps=await self.steps(last=LAST_STEPS),
            settings=await Settings(self._connection).all(),
            configurations=await Settings(self._connection).resolved(),
            environments=await self._environments(),
            evaluations=(await Evaluations(self._connection).all())[: -LAST_EVALUATIONS - 1 : -1],
            at=now(),
        )

    async def _environments(self) -> list[EnvironmentCount]:
        is_done = {"$cond": [{"$eq": ["$status", TaskStatus.COMPLETED.value]}, 1, 0]}
        groups = await self._aggregate(
            TASK,
            {"$match": {"environment": {"$ne": None}}},
            {
                "$group": {
                    "_id": {"split": "$split", "environment": "$environment"},
                    "tasks": {"$sum": 1},
                    "finalized": {"$sum": is_done},
                    "trajectories": {"$sum": "$group.scored"},
                    "score": {"$avg": "$group.mean_score"},
                    "pass_rate": {"$avg": "$group.pass_rate"},
                }
            },
            _BY_ID,
        )
        return [EnvironmentCount(**group.pop("_id"), **group) for group in groups]

    async def _rows(self, row: type[R], view: str, query: Json, *, limit: int | None = None) -> list[R]:
        source, pipeline = VIEWS[view]
        stages: list[Json] = [{"$match": query}, *pipeline]
        if limit is not None:
            stages.append({"$limit": limit})
        return [row.from_document(document) for document in await self._aggregate(source, *stages)]

    async def _trained_by(self, step: int) -> list[str]:
        """Return the ids of the data of the committed step with this number."""
        document = await self._collection(STEP).find_one(
            {"step": step, "status": {"$in": values(APPLIED_STEPS)}}, {"data": 1}
        )
        return [] if document is None else document["data"]

    async def _by_status(
        self, name: str, key: object, status: object = "$status"
    ) -> dict[str, dict[str, int]]:
        groups = await self._aggregate(
            name, {"$group": {"_id": {"key": key, "status": status}, "count": {"$sum": 1}}}
        )
        counts: dict[str, dict[str, int]] = defaultdict(dict)
        for group in groups:
            counts[group["_id"]["key"]][group["_id"]["status"]] = group["count"]
        return dict(counts)

    async def _data(self) -> list[DataCount]:
        fields = {
            "count": {"$sum": 1},
            "tokens": {"$sum": "$tokens"},
            "trainable_tokens": {"$sum": "$trainable_tokens"},
            "because": {"$max": "$problem"},
        }
        groups = await self._aggregate(DATA, {"$group": {"_id": "$status", **fields}})
        return [DataCount(status=group.pop("_id"), **group) for group in groups]

    async def _lengths(self) -> list[LengthBias]:
        trained = {"$gt": ["$trained_count", 0]}
        groups = await self._aggregate(
            RECORD,
            {"$match": {"score": {"$ne": None}}},
            {
                "$group": {
                    "_id": "$split",
                    "sampled": {"$sum": 1},
                    "sampled_tokens": {"$avg": "$generated_tokens"},
                    "trained": {"$sum": {"$cond": [trained, 1, 0]}},
                    "trained_tokens": {"$avg": {"$cond": [trained, "$generated_tokens", None]}},
                }
            },
            _BY_ID,
        )
        return [LengthBias(split=group.pop("_id"), **group) for group in groups]

    async def _prompts(self) -> list[PromptTokens]:
        fields = {"tokens": {"$sum": "$input_tokens"}, "cached": {"$sum": "$cached_tokens"}}
        groups = await self._aggregate(
            RECORD, {"$group": {"_id": "$split", **fields}}, {"$match": {"tokens": {"$gt": 0}}}, _BY_ID
        )
        return [PromptTokens(split=group.pop("_id"), **group) for group in groups]

    async def _aggregate(self, name: str, *stages: Mapping[str, Any]) -> list[Json]:
        cursor = await self._collection(name).aggregate(list(stages))
        return await cursor.to_list()
