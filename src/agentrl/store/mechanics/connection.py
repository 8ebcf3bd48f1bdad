"""Connect to the database of one run: its collections, turns, time limits, checks, transactions, batches."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

import pymongo
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    ConfigurationError,
    DuplicateKeyError,
    InvalidURI,
    PyMongoError,
)  # fmt: skip
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.uri_parser import parse_uri
from pymongo.write_concern import WriteConcern

from agentrl.base.registry import Registry
from agentrl.config.run import SYSTEM_DATABASES
from agentrl.documents.document import Document, follow_clock
from agentrl.documents.run import SCHEMA
from agentrl.errors import RunMissingError, StoreError, StoreUnavailableError
from agentrl.store.mechanics.retry import (
    ENCODING_ERRORS,
    OutageLog,
    is_outage,
    retry_while_unavailable,
    store_error,
)

TASK: Final = "Task"
RECORD: Final = "Record"
MODEL_CALL: Final = "DispatchedSamplingTask"
DATA: Final = "DBRecordData"
VERSION: Final = "PolicyVersion"
SERVICE: Final = "InferenceService"
STEP: Final = "TrainStep"
RUN: Final = "Run"
"""Facts about the run, which only administrators change."""
GATE: Final = "Admission"
"""Written by samplers that admit groups."""
EPOCH: Final = "Epoch"
"""Written by samplers that open epochs."""
SAMPLER: Final = "SamplerProcess"
"""The samplers that run, and which of them are asked to drain."""
OUTAGE: Final = "Outage"
"""Dependencies that samplers find down."""
IMPORTS: Final = "Imports"
"""The functions that samplers may import; only administrators write it."""
GATEWAY_SESSION: Final = "GatewaySession"
"""The base URLs of trajectories."""
GATEWAY_CALL: Final = "GatewayCall"
"""The requests to gateways."""
LEASE: Final = "TrainerLease"
"""The lease by which trainers exclude each other."""
SETTINGS: Final = "Settings"
"""The settings of the run's first process; only administrators change them."""
IMAGE: Final = "Image"
"""The images of tasks, tool results and requests, by the hash of their bytes."""
EVALUATION: Final = "Evaluation"
"""Evaluations of policies, with their results."""
JUDGE_CHECK: Final = "JudgeCheck"
"""What judges gave a gold slice, by step."""
LABEL: Final = "Label"
"""What people say of trajectories."""
TOKEN_STATISTICS: Final = "TokenStatistics"
"""Importance ratios and entropies of trained tokens, by step."""
COLUMN: Final = "Column"
"""Values of trajectories that other processes fill in, such as the logprobs of a teacher."""
RETRACTION: Final = "Retraction"
"""The calls of ``agentrl retract``."""
TOMBSTONE: Final = "Tombstone"
"""The ids of what they withdrew."""

SCHEMA_VERSION: Final = 1
"""Version of the schema that this code reads and writes, stored in ``Run``."""


_session: ContextVar[AsyncClientSession | None] = ContextVar("agentrl_store_session", default=None)
_READS = ("aggregate", "count_documents", "distinct", "find", "find_one")
_WRITES = (
    "bulk_write", "create_index", "delete_many", "delete_one", "find_one_and_delete", "find_one_and_update",
    "insert_many", "insert_one", "replace_one", "update_many", "update_one",
)  # fmt: skip
_LOOK_SECONDS: Final = 0.5
SETTLE_SECONDS: Final = 2 * _LOOK_SECONDS
"""How long after the mark no process writes to the run any more. Only then is its database copied or dropped:
MongoDB would make a dropped one anew, without schema, for the next document of such a process."""


class RunFence:
    """Looks before a write, at most every half second, whether the run is there and not marked.

    ``schema`` is the run's schema document when the process opened it: another run may have its name since.

    A process that was stopped for a while looks before its first write. Reads do not look: they make nothing,
    and an idle process, which mostly reads, then asks the server for nothing more.
    """

    def __init__(self, database: AsyncDatabase[dict[str, Any]], schema: Mapping[str, Any]) -> None:
        self._database = database
        self._made_at = schema.get("made_at")
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def check(self) -> None:
        """Raise RunMissingError if the run is being renamed or deleted, or is gone."""
        if self._is_fresh():
            return
        # Let one look serve all: a thousand writes that come at once would each ask.
        async with self._looking:
            if self._is_fresh():
                return
            # Count from before the look: the mark may be set while its answer is on the way.
            began = time.monotonic()
            # Read outside the transaction around the write: its snapshot may be older than the mark.
            schema = await self._database[RUN].find_one({"_id": SCHEMA})
            is_ours = schema is not None and schema.get("made_at") == self._made_at
            if schema is None or not is_ours or schema.get("renaming") or schema.get("deleting"):
                raise RunMissingError(
                    f"run {self._database.name!r} has been renamed or deleted, or is about to be",
                    hint="agentrl runs lists the runs; restart this process with the run's new name",
                )
            self._looked_at = began

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._looked_at < _LOOK_SECONDS


class Collection(AsyncCollection[dict[str, Any]]):
    """A collection whose reads and writes belong to the transaction around them, unless given a session.

    With a ``fence``, a write raises RunMissingError once the run has been renamed or deleted. Calls that are
    not listed above join no transaction and ask nothing; neither do those of a copy ``with_options``.
    """

    def __init__(
        self, database: AsyncDatabase[dict[str, Any]], name: str, fence: RunFence | None, **options: Any
    ) -> None:
        super().__init__(database, name, **options)
        self._fence = fence


# not AsyncClientSession.bind: PyMongo 4.20 then sends the client's write concern, which a transaction refuses
def _reading(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(
        self: Collection, /, *args: Any, session: AsyncClientSession | None = None, **options: Any
    ) -> Any:
        return call(self, *args, session=session or _session.get(), **options)

    return wrapper


def _writing(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    async def wrapper(
        self: Collection, /, *args: Any, session: AsyncClientSession | None = None, **options: Any
    ) -> Any:
        if self._fence is not None:
            await self._fence.check()
        return await call(self, *args, session=session or _session.get(), **options)

    return wrapper


for _name in _READS:
    setattr(Collection, _name, _reading(getattr(AsyncCollection, _name)))
for _name in _WRITES:
    setattr(Collection, _name, _writing(getattr(AsyncCollection, _name)))


@contextmanager
def use_session(session: AsyncClientSession | None) -> Iterator[None]:
    """Make the calls of a block part of the transaction of ``session``; with None, of no transaction.

    One call follows another, also in tasks that begin in the block: a session makes one call at a time.
    """
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


async def abort() -> None:
    """Undo what the transaction around this call has written; later calls of its block are in none."""
    session = _session.get()
    assert session is not None  # a programming error: there is no transaction
    await session.abort_transaction()


Json = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D", bound=Document)

CONNECTIONS = 32
"""Maximum size of a process's connection pool; operations wait for a free connection. Two more connections
monitor the server."""
_TURNS = 4 * CONNECTIONS
_BEFORE_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_IDLE_MS = 300_000
_MIN_VERSION = (6, 0)

TRANSACTION: Final[Mapping[str, Any]] = {
    "read_concern": ReadConcern("snapshot"), "write_concern": WriteConcern(w="majority", j=True),
}  # fmt: skip
"""The options of every transaction."""


_has_turn: ContextVar[bool] = ContextVar("agentrl_store_has_turn", default=False)


class Turns:
    """Lets at most ``limit`` operations run at a time; others wait in the order in which they came.

    The driver counts the wait for a free connection as time of an operation. Without a bound, a thousand
    calls at once therefore time out although the server answers all of them.
    """

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    async def take(self, operation: Callable[[], Awaitable[R]]) -> R:
        """Return what ``operation`` returns, in its turn. Operations inside it belong to the same turn."""
        if _has_turn.get():
            return await operation()
        async with self._free:
            token = _has_turn.set(True)
            try:
                return await operation()
            finally:
                _has_turn.reset(token)


def context_with_turn() -> Context:
    """Return an empty context for a task that works for operations which have their turns: it never waits."""
    context = Context()
    context.run(_has_turn.set, True)
    return context


@dataclass(frozen=True)
class LocalServer:
    """A running server that was found by its folder on this machine."""

    uri: str
    explain: Callable[[], StoreError | None]
    """Says why the server fails, if its folder shows it: its disk may be full."""


DATABASE_SERVERS: Registry[Callable[[str], LocalServer]] = Registry(
    "database server", group="agentrl.database_servers", built_in=("agentrl.local.mongod",)
)
"""Name → what finds the running server of a folder; ``embedded`` is asked where no URI is given."""


class Connection:
    """A client whose operations each take at most ``timeout`` seconds.

    Writes are journaled by a majority of the replica set. Reads return only what a majority has, so that the
    loss of a primary never undoes what was read. ``host`` is the address without credentials: it is safe to
    show. ``explain`` returns what is known of an outage, such as a full disk, and errors then name it.
    """

    def __init__(
        self, uri: str, database: str, timeout: float, explain: Callable[[], StoreError | None] | None = None
    ) -> None:
        self.timeout = timeout
        self.outage = OutageLog()
        self.opened_at = time.monotonic()
        self.fence: RunFence | None = None
        """Checked before each write of a process that works on an existing run."""
        self._turns = Turns(_TURNS)
        self.host = _host(uri)
        self._explain = explain
        milliseconds = max(1, int(timeout * 1000))
        try:
            self.client: AsyncMongoClient[Json] = AsyncMongoClient(
                # Wait for majority and journal: w=1, j=false lost 74 to 501 acknowledged writes at a kill -9.
                uri, tz_aware=True, appname="agentrl", w="majority", journal=True, retryWrites=True,
                retryReads=True, readConcernLevel="majority", serverSelectionTimeoutMS=milliseconds,
                connectTimeoutMS=milliseconds, timeoutMS=milliseconds,
                maxPoolSize=CONNECTIONS, maxIdleTimeMS=_IDLE_MS,
            )  # fmt: skip
        except (ConfigurationError, InvalidURI, ValueError) as error:
            raise StoreError(
                f"--db_connection_string is not a MongoDB URI: {error}",
                hint="write mongodb://USER:PASSWORD@HOST:PORT/?replicaSet=NAME, user and password"
                " percent-encoded",
            ) from error
        self.database: AsyncDatabase[Json] = self.client[database]

    def beside(self, database: str) -> Self:
        """Return a connection to another run of the same server. It shares the client: do not close it."""
        # Drop the fence with the database: it looks at the schema document of this run.
        other = copy.copy(self)
        other.database, other.fence = self.client[database], None
        return other

    def collection(self, name: str, **options: Any) -> AsyncCollection[Json]:
        """Return a collection of this run, whose calls belong to the transaction around them.

        The options are the driver's: ``read_concern``, ``write_concern`` and others.
        """
        return Collection(self.database, name, self.fence, **options)

    async def databases(self) -> list[str]:
        """Return the databases that this user may see, by name, without the server's own."""
        # Ask for names alone: otherwise the server measures every database.
        reply = await self.client.admin.command("listDatabases", nameOnly=True, authorizedDatabases=True)
        return sorted({database["name"] for database in reply["databases"]} - SYSTEM_DATABASES)

    async def server_time(self) -> datetime:
        """Return the time of the server's clock."""
        moment: datetime = (await self.client.admin.command("hello"))["localTime"]
        # Add the zone: ``command`` decodes by the driver's defaults, not by the client's ``tz_aware``.
        return moment.replace(tzinfo=UTC)

    async def check(self) -> None:
        """Raise a StoreError unless the server is MongoDB 6.0 or newer and has transactions.

        From then on the times that this process stores and shows follow the server's clock.
        """
        try:
            version = (await self.client.admin.command("buildInfo"))["version"]
            hello = await self.client.admin.command("hello")
            follow_clock(hello["localTime"])
        except PyMongoError as error:
            raise self.error("connecting", error) from error
        if tuple(int(part) for part in version.split(".")[:2]) < _MIN_VERSION:
            raise StoreError(
                f"MongoDB at {self.host} is version {version}, and AgentRL needs 6.0 or newer",
                hint="use a newer server, or leave --db_connection_string out to use the embedded server",
            )
        # Accept a mongos, which names no set: a sharded cluster has transactions and change streams.
        if "setName" not in hello and hello.get("msg") != "isdbgrid":
            raise StoreError(
                f"MongoDB at {self.host} is a standalone server, without transactions and change streams",
                hint="for a replica set of one, start mongod with --replSet agentrl (and --keyFile FILE if"
                " it has --auth), then once: mongosh --eval 'rs.initiate()' (docs/coming_from.md); or use"
                " deploy/mongo/docker-compose.yml",
            )

    async def transaction(self, write: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run ``write`` in a transaction; retry it after transient errors, within ``timeout``.

        What it reads and writes, one call after another, is part of the transaction (``use_session``).
        """
        async with self.client.start_session() as session:
            # Bound the retries: with_transaction alone goes on for 120 seconds.
            with pymongo.timeout(self.timeout), use_session(session):
                # Name the primary: a transaction refuses what a user's URI may say, secondaryPreferred.
                return await session.with_transaction(
                    lambda _: write(), **TRANSACTION, read_preference=ReadPreference.PRIMARY
                )

    def error(self, doing: str, error: PyMongoError) -> StoreError:
        """Return the StoreError for a driver error that was raised while ``doing``."""
        failure = store_error(doing, error, self.host, self.timeout)
        if self._explain is not None and isinstance(failure, StoreUnavailableError):
            problem = self._explain()
            if problem is not None:
                return StoreUnavailableError(f"{doing}: {problem.message}", hint=problem.hint)
        return failure

    async def call(self, operation: Callable[[], Awaitable[R]], doing: str) -> R:
        """Call ``operation``; retry it during an outage as ``retry_outages`` allows. Raises StoreErrors."""

        def to_store_error(error: Exception) -> StoreError:
            if isinstance(error, (StoreUnavailableError, RunMissingError)):
                return error
            if isinstance(error, PyMongoError):
                return self.error(doing, error)
            if isinstance(error, ENCODING_ERRORS):
                text = f"{type(error).__name__}: {error}"
                return StoreError(f"{doing}: no document can hold this: {text}")
            raise error

        return await retry_while_unavailable(lambda: self._turns.take(operation), to_store_error, self.outage)

    async def close(self) -> None:
        """Close the client."""
        await self.client.close()


class Repository:
    """Base class: the database calls on one collection or for one concern."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _collection(self, name: str) -> AsyncCollection[Json]:
        return self._connection.collection(name)

    async def _one(self, kind: type[D], name: str, query: Json, **options: Any) -> D | None:
        """Return the first document of a collection that matches, as ``kind``; None if there is none."""
        document = await self._collection(name).find_one(query, **options)
        return None if document is None else kind.from_document(document)

    async def _all(self, kind: type[D], name: str, query: Json, **options: Any) -> list[D]:
        """Return the documents of a collection that match, as ``kind``."""
        return [kind.from_document(found) async for found in self._collection(name).find(query, **options)]

    async def _ids(self, name: str, query: Json, **options: Any) -> list[Any]:
        """Return the ``_id`` of each document of a collection that matches."""
        return [found["_id"] async for found in self._collection(name).find(query, {"_id": 1}, **options)]

    async def _pages(
        self, name: str, query: Json, size: int, fields: Json | None = None
    ) -> AsyncIterator[list[Json]]:
        """Yield the documents that match by ``_id``, at most ``size`` in each page and query."""
        above: Json = {}
        while True:
            cursor = self._collection(name).find({**query, **above}, fields, sort=[("_id", 1)], limit=size)
            if not (page := await cursor.to_list()):
                return
            yield page
            above = {"_id": {"$gt": page[-1]["_id"]}}

    async def _aggregate(self, name: str, *stages: Json) -> list[Json]:
        """Return what an aggregation of a collection yields."""
        return await (await self._collection(name).aggregate(list(stages))).to_list()

    async def _count_by(self, field: str, name: str, query: Json) -> dict[str, int]:
        """Return {value of ``field``: number of the documents that match}."""
        counted = {"_id": f"${field}", "count": {"$sum": 1}}
        groups = await self._aggregate(name, {"$match": query}, {"$group": counted})
        return {group["_id"]: int(group["count"]) for group in groups}


S = TypeVar("S", bound=Repository)


def database_call(
    method: Callable[Concatenate[S, P], Awaitable[R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Decorate a method: convert driver errors to StoreErrors and retry as ``retry_outages`` allows.

    The method's name begins the message: ``PolicyVersions.by_ids`` becomes "policy versions: by ids".
    """
    owner, name = method.__qualname__.rsplit(".", 1)
    doing = f"{_BEFORE_CAPITAL.sub(' ', owner).lower()}: {name.strip('_').replace('_', ' ')}"

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._connection.call(lambda: method(self, *args, **kwargs), doing)

    return call


Item = TypeVar("Item")
Result = TypeVar("Result")
_MAX_BATCH = 64


class WriteCoalescer(Generic[Item, Result]):
    """Collects the items that arrive while a write is in flight and writes them as the next batch.

    An item that arrives while nothing is in flight is written at once. ``batched`` returns the results or
    errors of its items in order, or None if it cannot write them all. In that case, and after any error
    except an outage, ``single`` (or else ``batched``) writes each item alone: an item that cannot be encoded
    or that the server refuses gets an error of its own, and the others are written. Both functions must be
    idempotent.
    """

    def __init__(
        self,
        batched: Callable[[Sequence[Item]], Coroutine[Any, Any, Sequence[Result | BaseException] | None]],
        single: Callable[[Item], Coroutine[Any, Any, Result]] | None = None,
    ) -> None:
        self._batched = batched
        self._single = single
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def write(self, item: Item) -> Result:
        """Write the item and return its result. After a cancellation the item may be written or not."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._writer is None:
            # Write in an empty context: the transaction and retries of the first caller are its own.
            self._writer = asyncio.create_task(
                self._write_waiting(), name="agentrl-coalesced-writes", context=context_with_turn()
            )
        return await future

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
                await self._write_batch(batch)
        finally:
            self._writer = None

    async def _write_batch(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        """Write the batch and pass each caller its result or error."""
        results: Sequence[Result | BaseException]
        try:
            try:
                results = await self._results([item for item, _ in batch])
            except Exception as error:  # noqa: BLE001  every caller receives it
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                # Skip who has gone: its future refuses a result, and the callers behind would be cancelled.
                if future.cancelled():
                    continue
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)
        finally:
            for _, future in batch:
                if not future.done():
                    future.cancel()

    async def _results(self, items: list[Item]) -> Sequence[Result | BaseException]:
        if len(items) > 1:
            batched = asyncio.create_task(self._batched(items))
            await asyncio.wait([batched])
            error = batched.exception()
            if error is not None and is_outage(error):
                return [error] * len(items)
            results: Sequence[Result | BaseException] | None = None if error is not None else batched.result()
            if results is not None:
                return results
        alone: list[Result | BaseException] = await asyncio.gather(
            *map(self._write_alone, items), return_exceptions=True
        )
        return alone

    async def _write_alone(self, item: Item) -> Result:
        if self._single is not None:
            return await self._single(item)
        (result,) = await self._batched([item]) or ()
        if isinstance(result, BaseException):
            raise result
        return result


def id_prefix(prefix: str) -> Json:
    """Return the condition that a text begins with ``prefix``, which ends with a slash, and has more."""
    return {"$gt": prefix, "$lt": f"{prefix[:-1]}0"}  # "0" follows "/"


async def insert_if_missing(collection: AsyncCollection[Json], document: Document) -> None:
    """Insert the document unless one with its ``_id`` exists."""
    fields = document.to_document()
    if await collection.find_one({"_id": fields["_id"]}, {"_id": 1}) is None:
        with contextlib.suppress(DuplicateKeyError):  # another process inserted it at the same moment
            await collection.insert_one(fields)


def _host(uri: str) -> str:
    try:
        nodes = parse_uri(uri, validate=False)["nodelist"]
    except (PyMongoError, ValueError):
        return uri.rpartition("@")[2].partition("/")[0] if "@" in uri else "the address given"
    return ",".join(f"{host}:{port}" for host, port in nodes)
