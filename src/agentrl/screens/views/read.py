"""Read a run for people: rows of the audit views, steps, trajectories and their tokens, pages of a search."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, Self, TypeVar

import numpy as np
import pymongo
from numpy.typing import NDArray
from pymongo.errors import PyMongoError

from agentrl.documents.document import Document, Root, is_finite, replace_surrogates
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_floats, unpack_halves, unpack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import (
    APPLIED_STEPS,
    SHOWN_STATUSES,
    TRAINED,
    DataStatus,
    RecordStatus,
    StepStatus,
    values,
)
from agentrl.documents.training import TokenStatistics, TrainableSpan
from agentrl.errors import ConfigError, StoreError
from agentrl.screens.views.pipelines import (
    EngineRow,
    GroupRow,
    StepRow,
    TaskRow,
    TrajectoryRow,
    as_is,
    excerpt,
    known_steps,
)
from agentrl.store.mechanics.connection import (
    DATA,
    LABEL,
    MODEL_CALL,
    RECORD,
    STEP,
    TASK,
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
    others: Sequence[Record] = ()
    """The other Records of its slot: what failed or was begun anew, and branches that its owners dropped."""


class Views(Repository):
    """The read path of every screen, the quickstart's report and notebooks. It never writes.

    Rows come from the pipelines of the ``audit_*`` views, run on the collections.
    """

    async def _rows(self, row: type[R], view: str, *before: Json, after: Sequence[Json] = ()) -> list[R]:
        """Return the rows of a view; ``before`` runs on the documents, ``after`` on the rows."""
        source, pipeline = VIEWS.get(view)
        return [row.from_document(each) for each in await self._aggregate(source, *before, *pipeline, *after)]

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
        others = {"task": record.task, "traj_id": record.traj_id, "_id": {"$ne": record_id}}
        data = await self._collection(DATA).find_one({"_id": record_id}, {"trained_at_steps": 1})
        return WholeTrajectory(
            record=record,
            calls=(await read_model_calls(self._connection, [record_id]))[record_id],
            trained_at_steps=known_steps(data["trained_at_steps"] if data else (), record.last_trained_step),
            others=await self._all(Record, RECORD, others, sort=[("attempt", 1)]),
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


class TokenReads(Views):
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
        trained_at = known_steps(data.trained_at_steps if data else (), record.last_trained_step)
        steps = await self._steps(trained_at)
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


MAX_PAGE: Final = 200
MAX_TEXT: Final = 200
READ_SECONDS: Final = 10.0
"""Longest time of one page; a slower filter is refused with an error."""
SEARCH_SECONDS: Final = 2.0
"""How long one page searches model calls for a text or a tool; its last row tells where to go on."""
_FIRST_WINDOW, _LARGEST_WINDOW = 256, 2048
_TEXTS = (
    "messages.content", "messages.content.text", "response.content", "response.reasoning_content",
    "tool_executions.result",
)  # fmt: skip
_EXCERPTS = {name: excerpt(name, 400, f"${name}") for name in ("query", "answer", "final_answer")}
_COUNTED = 10_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Bounds:
    """An inclusive range; None leaves a side open. Raises ConfigError if it is empty or not finite."""

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for value in (self.low, self.high):
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"a bound is {value}", hint="give a finite number")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(
                f"the range from {self.low:g} to {self.high:g} is empty", hint="exchange its bounds"
            )

    @property
    def query(self) -> Json:
        """Return the MongoDB operators of the range; empty if both sides are open."""
        operators = {"$gte": self.low, "$lte": self.high}
        return {name: value for name, value in operators.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFilter:
    """Which trajectories to read; a field that is None, and an open range, select all.

    Raises ConfigError for a range that is empty and for a text that cannot be searched.
    """

    status: str | None = None
    """A status as people read it, of ``SHOWN_STATUSES``: ``ready`` leaves out what is ``trained``."""
    score: Bounds = field(default_factory=Bounds)
    step: int | None = None
    """Trajectories that the committed step with this number trained."""
    split: str | None = None
    task: str | None = None
    """A Task's ``_id`` (``train/0/task_001``), or its ``task_id`` in any split and epoch."""
    tool: str | None = None
    """Trajectories that called the tool of this name."""
    failure: str | None = None
    """The kind of the failure: engine, tool, timeout, …"""
    text: str | None = None
    """Literal text, in any case, of the question, the final answer, a message, response or tool result."""
    version: int | None = None
    """Trajectories whose tokens may be of this policy version: it is between their lowest and highest."""
    tokens: Bounds = field(default_factory=Bounds)
    """Generated tokens."""
    turns: Bounds = field(default_factory=Bounds)
    """Model calls."""
    label: str | None = None
    """Trajectories that a person gave this label."""
    answer_seen_in: str | None = None
    """Trajectories whose answer stood in a result of the tool of this name."""

    def __post_init__(self) -> None:
        if self.status is not None and self.status not in SHOWN_STATUSES:
            raise ConfigError(
                f"status is {self.status[:80]!r}", hint=f"choose one of {', '.join(SHOWN_STATUSES)}"
            )
        if self.text is None:
            return
        if not 0 < len(self.text) <= MAX_TEXT or "\x00" in self.text:
            raise ConfigError(
                f"the text to search has {len(self.text)} characters",
                hint=f"give 1 to {MAX_TEXT} characters, without NUL",
            )

    @property
    def is_empty(self) -> bool:
        """Whether it selects all."""
        return self == TrajectoryFilter()

    @property
    def query(self) -> Json:
        """Return the filter of the Records, without ``step``, ``task``, ``tool``, ``text`` and ``label``.

        ``TrajectorySearch`` resolves these with the other collections.
        """
        query: Json = {}
        if self.split is not None:
            query["split"] = self.split
        if self.status is not None:
            is_ready = self.status in (RecordStatus.READY, TRAINED)
            query["status"] = RecordStatus.READY.value if is_ready else self.status
            if is_ready:
                query["trained_count"] = {"$gt": 0} if self.status == TRAINED else 0
        if self.failure is not None:  # only failed Records have one, and an index begins with the status
            query = {"status": RecordStatus.FAILED.value, **query, "failure.kind": self.failure}
        if self.answer_seen_in is not None:
            query["answer_seen_in"] = self.answer_seen_in
        if self.version is not None:
            query["min_version"] = {"$lte": self.version}
            query["max_version"] = {"$gte": self.version}
        for name, bounds in (
            ("score", self.score), ("generated_tokens", self.tokens), ("turns", self.turns)
        ):  # fmt: skip
            if bounds.query:
                query[name] = bounds.query
        return query


class TrajectoryOrder(StrEnum):
    """The order of a page. Orders by score leave out trajectories without one."""

    key: tuple[str, int]
    """The sorted field of the Record, and 1 or -1."""

    NEWEST = "newest", "created_at", -1
    OLDEST = "oldest", "created_at", 1
    HIGHEST_SCORE = "highest_score", "score", -1
    LOWEST_SCORE = "lowest_score", "score", 1
    LONGEST = "longest", "generated_tokens", -1
    SHORTEST = "shortest", "generated_tokens", 1
    MOST_TURNS = "most_turns", "turns", -1

    def __new__(cls, value: str, field: str = "", direction: int = 1) -> Self:
        order = str.__new__(cls, value)
        order._value_, order.key = value, (field, direction)
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryPage:
    """Rows in the order asked for. ``after`` continues behind them; None at the end.

    A search for a text or a tool may end early, with fewer rows than asked for: ``searched`` trajectories
    were read, and ``after`` goes on behind them. Long questions and answers are cut.
    """

    rows: Sequence[TrajectoryRow]
    after: str | None
    searched: int | None = None
    """None unless model calls were searched."""


class TrajectorySearch(Views):
    """Reads pages of trajectories. It never writes; every read has a time limit."""

    @database_call
    async def page(
        self,
        wanted: TrajectoryFilter,
        *,
        order: TrajectoryOrder = TrajectoryOrder.NEWEST,
        limit: int = 50,
        after: str | None = None,
    ) -> TrajectoryPage:
        """Return up to ``limit`` trajectories behind the row that ``after`` names.

        Raises ConfigError for an ``after`` that no page gave or a ``limit`` that is not 1 to 200, StoreError
        if the read takes longer than 10 seconds.
        """
        if not 0 < limit <= MAX_PAGE:
            raise ConfigError(f"a page of {limit} trajectories", hint=f"give 1 to {MAX_PAGE}")
        with _time_limit(READ_SECONDS):
            query = await self._query(wanted)
            if wanted.text is None and wanted.tool is None:
                keys = await self._keys(query, order, after, limit + 1)
                chosen, searched = keys[:limit], None
                then = _cursor(chosen[-1], order) if len(keys) > limit else None
            else:
                chosen, searched, then = await self._search(query, wanted, order, after, limit)
            ids = [key["_id"] for key in chosen]
            stages = {"$match": {"_id": {"$in": ids}}}, {"$set": _EXCERPTS}
            rows = {row.id: row for row in await self._rows(TrajectoryRow, "audit_trajectories", *stages)}
        found = [rows[record_id] for record_id in ids if record_id in rows]
        return TrajectoryPage(rows=found, after=then, searched=searched)

    @database_call
    async def count(self, wanted: TrajectoryFilter) -> int | None:
        """Count trajectories, with a filter up to 10,001; None for a filter on text or tool."""
        if wanted.text is not None or wanted.tool is not None:
            return None
        with _time_limit(READ_SECONDS):
            records = self._collection(RECORD)
            if wanted.is_empty:
                return await records.estimated_document_count()
            return await records.count_documents(await self._query(wanted), limit=_COUNTED + 1)

    async def _query(self, wanted: TrajectoryFilter) -> Json:
        """Return the filter of the Records, with steps, tasks and labels resolved to ids."""
        query = dict(wanted.query)
        ids: set[str] | None = None
        if wanted.step is not None:
            ids = set(await self._data_of({"step": wanted.step, "status": {"$in": values(APPLIED_STEPS)}}))
        if wanted.label is not None:
            labelled = set(await self._collection(LABEL).distinct("record", {"label": wanted.label}))
            ids = labelled if ids is None else ids & labelled
        if ids is not None:
            query["_id"] = {"$in": sorted(ids)}
        if wanted.task is not None:
            query["task"] = {"$in": [wanted.task, *await self._ids(TASK, {"task_id": wanted.task})]}
        return query

    async def _keys(self, query: Json, order: TrajectoryOrder, after: str | None, limit: int) -> list[Json]:
        """Return ``_id`` and sorted field of the next Records."""
        name, direction = order.key
        conditions: list[Json] = [query]
        if name == "score":
            conditions.append({"score": {"$ne": None}})
        if after is not None:
            value, last = _decode(after, order)
            operator = "$gt" if direction > 0 else "$lt"
            # The first condition bounds the scan of an index; the second excludes rows of the same value.
            conditions.append({name: {f"{operator}e": value}})
            conditions.append({"$or": [{name: {operator: value}}, {"_id": {operator: last}}]})
        cursor = self._collection(RECORD).find(
            {"$and": conditions}, {name: 1}, sort=[(name, direction), ("_id", direction)], limit=limit
        )
        return await cursor.to_list()

    async def _search(
        self, query: Json, wanted: TrajectoryFilter, order: TrajectoryOrder, after: str | None, limit: int
    ) -> tuple[list[Json], int, str | None]:
        """Return the found keys, the number of Records read, and where to go on; None at the end."""
        matches: list[Json] = []
        searched, window = 0, _FIRST_WINDOW
        until = time.monotonic() + SEARCH_SECONDS
        while True:
            keys = await self._keys(query, order, after, window)
            matching = await self._matching([key["_id"] for key in keys], wanted)
            for key in keys:
                searched += 1
                after = _cursor(key, order)
                if key["_id"] in matching:
                    matches.append(key)
                    if len(matches) == limit:
                        return matches, searched, after
            if len(keys) < window:
                return matches, searched, None
            if time.monotonic() >= until:
                return matches, searched, after
            window = min(2 * window, _LARGEST_WINDOW)

    async def _matching(self, ids: Sequence[str], wanted: TrajectoryFilter) -> set[str]:
        """Return the ids of the Records whose model calls have the tool and the text."""
        matching = set(ids)
        if wanted.tool is not None:
            matching &= await self._with_calls(matching, {"tool_executions.name": wanted.tool})
        if wanted.text is not None and matching:
            literal = {"$regex": re.escape(wanted.text), "$options": "i"}
            own = {"$or": [{"query": literal}, {"final_answer": literal}]}
            of_record = set(await self._ids(RECORD, {"_id": {"$in": sorted(matching)}, **own}))
            in_calls = {"$or": [{name: literal} for name in _TEXTS]}
            matching = of_record | await self._with_calls(matching - of_record, in_calls)
        return matching

    async def _with_calls(self, ids: set[str], query: Json) -> set[str]:
        calls = self._collection(MODEL_CALL)
        return set(await calls.distinct("record", {"record": {"$in": sorted(ids)}, **query}))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Bound the database calls of a block. Raises StoreError if they take longer."""
    try:
        with pymongo.timeout(seconds):
            yield
    except PyMongoError as error:
        if not error.timeout:
            raise
        raise StoreError(
            f"the trajectories could not be read within {seconds:g} s",
            hint="narrow the filter, for example by split, status or step",
        ) from error


def _cursor(key: Json, order: TrajectoryOrder) -> str:
    """Return the text that continues behind a row."""
    value = key.get(order.key[0])
    if isinstance(value, datetime):
        value = (value - _EPOCH) // timedelta(milliseconds=1)
    return base64.urlsafe_b64encode(json.dumps([order.value, value, key["_id"]]).encode()).decode()


def _decode(after: str, order: TrajectoryOrder) -> tuple[Any, str]:
    """Return the value and ``_id`` that ``_cursor`` wrote. Raises ConfigError for any other text."""
    try:
        written, value, last = json.loads(base64.urlsafe_b64decode(after.encode()))
        if order.key[0] == "created_at":
            value = _EPOCH + timedelta(milliseconds=value)
        is_known = isinstance(value, datetime) or is_finite(value)
        if written == order.value and is_known and replace_surrogates(last) == last and isinstance(last, str):
            return value if isinstance(value, datetime) else float(value), last
    except (ValueError, TypeError, OverflowError, RecursionError, binascii.Error):
        pass
    raise ConfigError(
        f"after is {after[:80]!r}, which no page of this order gave", hint="begin with the first page"
    )
