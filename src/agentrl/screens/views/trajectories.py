"""Read a page of trajectories: filtered, sorted, and continued after the last row of the page before."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Self

import pymongo
from pymongo.errors import PyMongoError

from agentrl.documents.document import is_finite, replace_surrogates
from agentrl.documents.status import APPLIED_STEPS, SHOWN_STATUSES, TRAINED, RecordStatus, values
from agentrl.errors import ConfigError, StoreError
from agentrl.screens.views.pipelines import TrajectoryRow, excerpt
from agentrl.screens.views.read import AuditReads
from agentrl.store.mechanics.connection import LABEL, MODEL_CALL, RECORD, STEP, TASK, Json, database_call

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


class TrajectorySearch(AuditReads):
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
            if wanted == TrajectoryFilter():
                return await records.estimated_document_count()
            return await records.count_documents(await self._query(wanted), limit=_COUNTED + 1)

    async def _query(self, wanted: TrajectoryFilter) -> Json:
        """Return the filter of the Records, with steps, tasks and labels resolved to ids."""
        query = dict(wanted.query)
        ids: set[str] | None = None
        if wanted.step is not None:
            step = await self._collection(STEP).find_one(
                {"step": wanted.step, "status": {"$in": values(APPLIED_STEPS)}}, {"data": 1}
            )
            ids = set(step["data"]) if step is not None else set()
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
