"""Read a run for people: rows of the audit views, optimizer steps, whole trajectories and their tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.document import Document, Root
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_floats, unpack_halves, unpack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import APPLIED_STEPS, DataStatus, RecordStatus, StepStatus, values
from agentrl.documents.training import TokenStatistics, TrainableSpan
from agentrl.screens.views.pipelines import (
    EngineRow,
    GroupRow,
    StepRow,
    TaskRow,
    TrajectoryRow,
    as_is,
    excerpt,
)
from agentrl.store.mechanics.connection import (
    DATA,
    RECORD,
    STEP,
    TOKEN_STATISTICS,
    VERSION,
    Json,
    Repository,
    database_call,
)
from agentrl.store.model_calls import read_model_calls
from agentrl.store.schema import VIEWS

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


class AuditReads(Repository):
    """Reads rows of the ``audit_*`` views: their pipelines, run on the collections."""

    async def _rows(self, row: type[R], view: str, *before: Json, after: Sequence[Json] = ()) -> list[R]:
        """Return the rows of a view; ``before`` runs on the documents, ``after`` on the rows."""
        source, pipeline = VIEWS.get(view)
        return [row.from_document(each) for each in await self._aggregate(source, *before, *pipeline, *after)]


class Views(AuditReads):
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
        found = await self._aggregate(RECORD, {"$match": {"_id": {"$in": ids}}}, {"$project": _OF_RECORD})
        rows = {row["_id"]: TrajectoryRow.from_document(row) for row in found}
        return [rows[key] for key in ids if key in rows]

    @database_call
    async def matching_trajectories(self, part: str, limit: int) -> list[str]:
        """Return the Record id that is ``part``; otherwise up to ``limit`` that begin or end with it."""
        if await self._ids(RECORD, {"_id": part}):
            return [part]
        literal = re.escape(part)
        query = {"$or": [{"_id": {"$regex": f"^{literal}"}}, {"_id": {"$regex": f"{literal}$"}}]}
        return await self._ids(RECORD, query, sort=[("_id", 1)], limit=limit)

    @database_call
    async def whole_trajectory(self, record_id: str) -> WholeTrajectory | None:
        """Return one trajectory with its model calls; None if there is no such Record."""
        record = await self._one(Record, RECORD, {"_id": record_id})
        if record is None:
            return None
        attempts = {"task": record.task, "traj_id": record.traj_id, "status": RecordStatus.FAILED.value}
        data = await self._collection(DATA).find_one({"_id": record_id}, {"trained_at_steps": 1})
        return WholeTrajectory(
            record=record,
            calls=(await read_model_calls(self._connection, [record_id]))[record_id],
            trained_at_steps=tuple(data["trained_at_steps"]) if data else (),
            failures=await self._all(Record, RECORD, attempts, sort=[("attempt", 1)]),
        )

    async def _data_of(self, query: Json) -> list[str]:
        """Return the ids of the data of a step."""
        document: Any = await self._collection(STEP).find_one(query, {"data": 1})
        return [] if document is None else document["data"]


def _of_split(split: str | None) -> Json:
    return {} if split is None else {"split": split}


NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class StepValues:
    """What one step computed of the tokens of a model call, in nats; NaN for tokens that it did not train."""

    log_ratios: NDArray[np.float32]
    """log πθ − log μ."""
    entropies: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTokens:
    """The generated tokens of one model call; every array has one element per token."""

    call: DispatchedSamplingTask
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """At sampling; NaN where none is stored."""
    versions: NDArray[np.int32]
    """The policy version that sampled the token; −1 if unknown."""
    advantages: NDArray[np.float32]
    """NaN for tokens that are not trained."""
    values: Mapping[int, StepValues] = field(default_factory=dict)
    """By the number of the step; without the steps that stored nothing of the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTokens:
    """The generated tokens of one trajectory, by model call."""

    record: Record
    calls: Sequence[CallTokens]
    data_status: DataStatus | None
    """None if the trajectory has no training data."""
    steps: Sequence[StepRow]
    """The committed steps that trained it, in order."""
    locations: Mapping[int, str]
    """Policy version → the folder of its weights, which holds the tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans(Document):
    """What the token view reads of training data."""

    status: DataStatus
    tokens: int
    spans: tuple[TrainableSpan, ...]
    trained_at_steps: tuple[int, ...] = ()


class TokenReads(AuditReads):
    """Reads tokens for the token view. It never writes."""

    @database_call
    async def trajectory(self, record_id: str) -> TrajectoryTokens | None:
        """Return the tokens of one trajectory; None if there is no such Record."""
        record = await self._one(Record, RECORD, {"_id": record_id})
        if record is None:
            return None
        calls = (await read_model_calls(self._connection, [record_id]))[record_id]
        fields = {"status": 1, "tokens": 1, "spans": 1, "trained_at_steps": 1}
        data = await self._one(_Spans, DATA, {"_id": record_id}, projection=fields)
        steps = await self._steps(data.trained_at_steps if data else ())
        values = await self._values(record_id, steps, data.tokens if data else 0)
        versions = {span.version for call in calls for span in call.versions}
        return TrajectoryTokens(
            record=record,
            calls=[_tokens(call, data.spans if data else (), values) for call in calls],
            data_status=data.status if data else None,
            steps=steps,
            locations=await self._locations(versions),
        )

    async def _steps(self, numbers: Sequence[int]) -> list[StepRow]:
        query = {"step": {"$in": list(numbers)}, "status": {"$in": values(APPLIED_STEPS)}}
        return await self._rows(StepRow, "audit_steps", {"$match": query}, {"$sort": {"step": 1}})

    async def _values(self, record_id: str, steps: Sequence[StepRow], tokens: int) -> dict[int, StepValues]:
        """Return what each of ``steps`` stored, over all ``tokens`` of the training data."""
        query = {"record": record_id, "train_step": {"$in": [step.id for step in steps]}}
        stored = await self._all(TokenStatistics, TOKEN_STATISTICS, query, sort=[("step", 1)])
        return {item.step: _spread(item, tokens) for item in stored if item.problem(tokens) is None}

    async def _locations(self, versions: set[int]) -> dict[int, str]:
        """Return the folders of ``versions``, and of the whole weights before: deltas have no tokenizer."""
        collection = self._collection(VERSION)
        cursor = collection.find({"_id": {"$in": sorted(versions)}}, {"location": 1})
        found = [item async for item in cursor]
        whole = {"_id": {"$lt": max(versions, default=0)}, "encoding": {"$in": ["full", None]}}
        newest = {"location": {"$ne": ""}, "pruned_at": None}
        before = await collection.find_one(whole | newest, {"location": 1}, sort=[("_id", -1)])
        return {item["_id"]: item["location"] for item in (*found, *([before] if before else []))}


def _spread(item: TokenStatistics, tokens: int) -> StepValues:
    """Return the values at their places among ``tokens``; NaN elsewhere."""
    places = np.concatenate([np.arange(span.start, span.end) for span in item.spans] or [np.zeros(0, int)])
    spread = []
    for packed in (item.log_ratios, item.entropies):
        values = np.full(tokens, np.nan, np.float32)
        values[places] = unpack_halves(packed)
        spread.append(values)
    return StepValues(*spread)


def token_versions(call: DispatchedSamplingTask, tokens: int) -> NDArray[np.int32]:
    """Return int32[tokens]: the policy version of each generated token; ``NO_VERSION`` if unknown."""
    versions = np.full(tokens, NO_VERSION, np.int32)
    for span in call.versions:
        versions[span.start : span.end] = span.version
    return versions


def _tokens(
    call: DispatchedSamplingTask, spans: Sequence[TrainableSpan], values: Mapping[int, StepValues]
) -> CallTokens:
    ids = unpack_ids(call.output_ids)
    stored = unpack_floats(call.logprobs)
    logprobs = np.full(len(ids), np.nan, np.float32)
    logprobs[: len(stored)] = stored[: len(ids)]
    advantages = np.full(len(ids), np.nan, np.float32)
    own = [span for span in spans if span.call == call.index]
    of_version = {span.version: span.advantage for span in own}
    for span in call.versions:
        advantages[span.start : span.end] = of_version.get(span.version, np.nan)
    end = max((span.end for span in own), default=0)  # a call's last token is trained
    here = slice(end - len(ids), end)
    of_steps = {
        step: StepValues(computed.log_ratios[here], computed.entropies[here])
        for step, computed in values.items()
        if end >= len(ids)
    }
    return CallTokens(
        call=call, ids=ids, logprobs=logprobs, versions=token_versions(call, len(ids)),
        advantages=advantages, values=of_steps,
    )  # fmt: skip
