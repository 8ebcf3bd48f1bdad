"""What a check reads and finds: pages of a run in consistent snapshots, invariants and their violations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Self

from pymongo import ASCENDING
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.base.batches import batches
from agentrl.config.schema import GroupConfig
from agentrl.documents.document import shortened
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Column
from agentrl.documents.training import Checkpoint, DBRecordData
from agentrl.errors import ConfigError, StoreError
from agentrl.store.mechanics.connection import Connection, Json


class Invariant(IntEnum):
    """A property that every run has, at every moment and at its end."""

    title: str
    """The invariant in one sentence."""

    TRAJECTORIES = 1, "slots end with one live Record, and no model call is missing"
    TRAINING = 2, "every token is trained by the steps that say so, and no more often than allowed"
    GROUPS = 3, "groups say what their Records say, and every score is a scorer's"
    STATES = 4, "states are legal, and no lease outlives its owner"
    VERSIONS = 5, "policy versions are whole, and tokens name those that were published"
    EPOCHS = 6, "every epoch holds every task of the file once"
    CONTENTS = 7, "tasks, calls, answers, scores and metrics are as they were written"
    FAMILY = 8, "a run and its parent name each other, and what the child needs is kept"
    RETRACTED = 9, "nothing but its tombstone is left of what was withdrawn"
    OWNERS = 10, "the owners of a trajectory follow one another, and each wrote in its own time"

    def __new__(cls, value: int, title: str = "") -> Self:
        invariant = int.__new__(cls, value)
        invariant._value_, invariant.title = value, title
        return invariant


@dataclass(frozen=True, slots=True)
class CheckProblem:
    """One thing that is wrong with one document."""

    document: str
    """Collection and ``_id``, as in ``Record train/0/task_001/3/1``."""
    what: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.document}: {self.what}: expected {_shown(self.expected)}, found {_shown(self.found)}"


@dataclass(frozen=True, slots=True)
class Violation:
    """A problem that breaks an invariant. ``key`` is the ``_id`` of the document to check again."""

    invariant: Invariant
    problem: CheckProblem
    key: Any

    def same_as(self) -> tuple[Any, ...]:
        """Return the identity of the violation; its values may change between two checks."""
        return self.invariant, self.problem.document, self.problem.what


class Findings:
    """Collects counts of checked things, violations and notes."""

    def __init__(self) -> None:
        self.checked: dict[Invariant, Counter[str]] = {invariant: Counter() for invariant in Invariant}
        self.violations: list[Violation] = []
        self.notes: list[str] = []

    def count(self, invariant: Invariant, things: str, number: int = 1) -> None:
        """Count ``number`` more ``things`` as checked against the invariant."""
        self.checked[invariant][things] += number

    def add(self, invariant: Invariant, key: Any, problems: Iterable[CheckProblem]) -> None:
        """Add the problems of one document."""
        self.violations.extend(Violation(invariant, problem, key) for problem in problems)

    def wrong(
        self, invariant: Invariant, key: Any, document: str, what: str, expected: Any, found: Any
    ) -> None:
        """Add one problem of a document."""
        self.add(invariant, key, [CheckProblem(document, what, expected, found)])

    def note(self, text: str) -> None:
        """Note what could not be checked; each text is kept once."""
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Findings) -> None:
        """Add the counts, violations and notes of ``other``."""
        for invariant, counts in other.checked.items():
            self.checked[invariant].update(counts)
        self.violations += other.violations
        for text in other.notes:
            self.note(text)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check."""

    checked: Mapping[Invariant, Mapping[str, int]]
    violations: tuple[Violation, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def of(self, invariant: Invariant) -> list[Violation]:
        """Return the violations of one invariant."""
        return [violation for violation in self.violations if violation.invariant is invariant]

    def to_json(self) -> dict[str, Any]:
        """Return the invariants with the numbers of checked things, the violations and the notes."""
        return {
            "invariants": [
                {
                    "number": invariant.value, "title": invariant.title,
                    "checked": dict(self.checked[invariant]), "violations": len(self.of(invariant)),
                }
                for invariant in Invariant
            ],
            "violations": [
                {"invariant": violation.invariant.value, "problem": str(violation.problem)}
                for violation in self.violations
            ],
            "notes": list(self.notes),
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield a line per invariant, then each violation and note, then the number of violations."""
        for invariant in Invariant:
            things = ", ".join(f"{number:,} {name}" for name, number in self.checked[invariant].items())
            yield (
                f"{invariant.value}. {invariant.title}: {things or 'nothing'} checked,"
                f" {_violations(len(self.of(invariant)))}"
            )
        for invariant in Invariant:
            for violation in self.of(invariant):
                yield f"invariant {invariant.value}: {violation.problem}"
        for note in self.notes:
            yield f"note: {note}"
        yield _violations(len(self.violations))


def _violations(number: int) -> str:
    return f"{number:,} violation{'' if number == 1 else 's'}"


def _shown(value: Any) -> str:
    return shortened(value if isinstance(value, str) else repr(value), 200)


Projection = Mapping[str, Any]

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, StoreError, ConfigError)
"""Raised by a rule on a document with a missing field, another type, or a flag out of its range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What to check, and the functions that live on a floor above the store.

    ``is_final``: the run is over, nothing may be unfinished. ``heartbeat_seconds``: how late after its expiry
    a lease may be taken over. ``settle_seconds``: the wait before a suspected violation is checked again.
    """

    compare_tokens: Callable[
        [DBRecordData, Sequence[DispatchedSamplingTask], GroupConfig | None, Sequence[Column]], str | None
    ]
    """Returns how training data differ from the conversion of calls and columns by the group's rules."""
    verify_files: Callable[[str, Mapping[str, Any]], str | None] | None = None
    """(folder, a file's name, bytes and sha256) → the difference; None: files are not read."""
    checkpoint: Checkpoint | None = None
    is_final: bool = False
    max_trained_count: int = 1
    heartbeat_seconds: float = 20.0
    clock_skew_seconds: float = 5.0
    settle_seconds: float = 3.0


class ConsistentRead:
    """The database at one moment: every read sees the same state."""

    def __init__(self, connection: Connection, session: AsyncClientSession) -> None:
        self.connection = connection
        self._session = session

    async def find(
        self, collection: str, query: Json, fields: Projection | None = None, *, by: str = "_id",
        limit: int = 0,
    ) -> list[Json]:  # fmt: skip
        """Return documents in the order of ``by``."""
        cursor = self.connection.collection(collection).find(
            query, fields, sort=[(by, ASCENDING)], limit=limit, session=self._session
        )
        return await cursor.to_list()

    async def each(
        self, collection: str, query: Json, fields: Projection, *, by: str = "_id"
    ) -> AsyncIterator[Json]:
        """Yield documents in the order of ``by``, with one batch in memory."""
        cursor = self.connection.collection(collection).find(
            query, fields, sort=[(by, ASCENDING)], session=self._session
        )
        async for document in cursor:
            yield document

    async def ids(self, collection: str, ids: Collection[Any]) -> set[Any]:
        """Return those of ``ids`` that exist."""
        documents = await self.find(collection, {"_id": {"$in": list(ids)}}, {"_id": 1})
        return {document["_id"] for document in documents}

    async def by_id(self, collection: str, ids: Collection[Any], fields: Projection) -> dict[Any, Json]:
        """Return the existing documents among ``ids``, by ``_id``."""
        documents = await self.find(collection, {"_id": {"$in": list(ids)}}, fields)
        return {document["_id"]: document for document in documents}

    async def aggregate(self, collection: str, pipeline: list[Json]) -> list[Json]:
        """Return the documents that a pipeline yields."""
        cursor = await self.connection.collection(collection).aggregate(pipeline, session=self._session)
        return await cursor.to_list()


@asynccontextmanager
async def snapshot(connection: Connection) -> AsyncIterator[ConsistentRead]:
    """Open a snapshot of now. The server keeps it for five minutes, so open one for each page."""
    async with connection.client.start_session(snapshot=True) as session:
        yield ConsistentRead(connection, session)


class RunCheck(ABC):
    """One part of the check of a run."""

    def __init__(self, connection: Connection, options: CheckOptions) -> None:
        self.connection = connection
        self.options = options

    @abstractmethod
    async def scan(self, findings: Findings) -> None:
        """Check everything."""

    @abstractmethod
    async def look_again(self, keys: Collection[Any], findings: Findings) -> None:
        """Check the documents of ``keys`` again."""


class CheckSection(RunCheck):
    """Checks the documents of one collection page by page, each page with ``inspect``."""

    collection: str
    fields: ClassVar[Projection]
    page_size: ClassVar[int] = 500
    order: ClassVar[str] = "_id"

    def __init__(self, connection: Connection, options: CheckOptions, collection: str | None = None) -> None:
        super().__init__(connection, options)
        if collection is not None:
            self.collection = collection

    @abstractmethod
    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        """Check the documents of ``page``, read at ``moment``."""

    async def _inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        """Call ``inspect``; a document that no rule can read is a violation and does not stop the check."""
        own = Findings()
        try:
            await self.inspect(moment, page, own)
        except MALFORMED as error:
            if len(page) > 1:
                for document in page:
                    await self._inspect(moment, [document], findings)
                return
            key = page[0].get(self.order)
            own = _unreadable(key, f"{self.collection} {key}", error)
        findings.merge(own)

    async def scan(self, findings: Findings) -> None:
        """Check every document."""
        query: Json = {}
        while True:
            async with snapshot(self.connection) as moment:
                page = await moment.find(
                    self.collection, query, self.fields, by=self.order, limit=self.page_size
                )
                if not page:
                    return
                await self._inspect(moment, page, findings)
            query = {self.order: {"$gt": page[-1][self.order]}}

    async def look_again(self, keys: Collection[Any], findings: Findings) -> None:
        """Check only the documents of ``keys``."""
        for some in batches(list(keys), self.page_size):
            async with snapshot(self.connection) as moment:
                page = await moment.find(
                    self.collection, {self.order: {"$in": some}}, self.fields, by=self.order
                )
                if page:
                    await self._inspect(moment, page, findings)


class Whole(RunCheck):
    """Checks a property of a whole collection, in one snapshot."""

    @abstractmethod
    async def inspect(self, moment: ConsistentRead, findings: Findings) -> None:
        """Check at ``moment``."""

    async def scan(self, findings: Findings) -> None:
        """Check everything."""
        own = Findings()
        try:
            async with snapshot(self.connection) as moment:
                await self.inspect(moment, own)
        except MALFORMED as error:
            own = _unreadable(None, f"{type(self).__name__} as a whole", error)
        findings.merge(own)

    async def look_again(self, keys: Collection[Any], findings: Findings) -> None:
        """Check everything again."""
        await self.scan(findings)


def _unreadable(key: Any, name: str, error: Exception) -> Findings:
    findings, found = Findings(), f"{type(error).__name__}: {error}"
    findings.wrong(
        Invariant.STATES, key, name, "documents that can be read", "every field, of its type", found
    )
    return findings


def only_if(
    document: str, what: str, is_due: bool, found: Any, expected: str = "a value"
) -> list[CheckProblem]:
    """Return a problem if a value is due and there is none, or if there is one (not None) that is not due."""
    if (found is not None) == is_due:
        return []
    return [CheckProblem(document, what, expected if is_due else None, found)]


def differing(document: str, rows: Sequence[tuple[str, Any, Any]]) -> list[CheckProblem]:
    """Return a problem for each (what, expected, found) whose values differ."""
    return [
        CheckProblem(document, what, expected, found) for what, expected, found in rows if expected != found
    ]
