"""One connection to one run's database: how it is opened, checked, bounded in time, and how it fails."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import pymongo
from bson.errors import BSONError
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    ConfigurationError,
    ConnectionFailure,
    ExecutionTimeout,
    InvalidURI,
    NetworkTimeout,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)  # fmt: skip
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.uri_parser import parse_uri
from pymongo.write_concern import WriteConcern

from agentrl.errors import StoreAwayError, StoreDeniedError, StoreError
from agentrl.store.outage import OutageLog, retry_while_away
from agentrl.store.validation_errors import refusal

Json = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")

CONNECTIONS = 32
"""The most connections that a process holds for operations, which wait for one; two more watch the server."""
_IDLE_MS = 300_000
_OLDEST = (6, 0)
_AUTHENTICATION_CODES = (13, 18)
_DISK_FULL_CODES = (14031, 17)
_KEY_NOT_FOUND = 211
"""A primary that has just been elected cannot yet check the time that the one before it signed."""
_NO_SESSIONS = "Sessions are not supported"
"""What the driver says of a replica set's member that has just started, too."""
_PASSING_LABELS = ("TransientTransactionError", "UnknownTransactionCommitResult", "RetryableWriteError")


UNENCODABLE = (BSONError, OverflowError, UnicodeEncodeError, RecursionError)
"""What encoding a document raises where it cannot hold a value."""


def is_outage(error: BaseException) -> bool:
    """Whether the database is away, rather than that it refuses what it was asked."""
    if isinstance(error, PyMongoError):
        return isinstance(error, ConnectionFailure) or error.timeout
    return isinstance(error, StoreAwayError)


class Connection:
    """A client bounded by ``timeout`` seconds per operation, majority-written and journaled.

    It reads what a majority has, and so nothing that the loss of a primary could undo.
    ``host`` is the address without credentials: it is safe to show.
    """

    def __init__(self, uri: str, database: str, timeout: float) -> None:
        self.timeout = timeout
        self.outage = OutageLog()
        self.host = _host(uri)
        milliseconds = max(1, int(timeout * 1000))
        try:
            self.client: AsyncMongoClient[Json] = AsyncMongoClient(
                uri, tz_aware=True, appname="agentrl", w="majority", journal=True, retryWrites=True,
                retryReads=True, readConcernLevel="majority", serverSelectionTimeoutMS=milliseconds,
                connectTimeoutMS=milliseconds, timeoutMS=milliseconds,
                maxPoolSize=CONNECTIONS, maxIdleTimeMS=_IDLE_MS,
            )  # fmt: skip
        except (ConfigurationError, InvalidURI, ValueError) as error:
            raise _uri_error(error) from error
        self.database: AsyncDatabase[Json] = self.client[database]

    def collection(self, name: str) -> AsyncCollection[Json]:
        """The collection of this run."""
        return self.database[name]

    async def check(self) -> None:
        """Raise a StoreError unless this is a MongoDB of at least 6.0 that has transactions."""
        try:
            hello = await self.client.admin.command("hello")
            version = (await self.client.admin.command("buildInfo"))["version"]
        except PyMongoError as error:
            raise self.error("connecting", error) from error
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            raise StoreError(
                f"MongoDB at {self.host} is version {version}, and AgentRL needs 6.0 or newer",
                hint="use a newer server, or leave --db_connection_string out for the embedded one",
            )
        if "setName" not in hello and hello.get("msg") != "isdbgrid":
            raise StoreError(
                f"MongoDB at {self.host} is a standalone server, without transactions and change streams",
                hint="start it with --replSet NAME and run rs.initiate() (deploy/mongo/docker-compose.yml)",
            )

    async def transaction(self, callback: Callable[[AsyncClientSession], Coroutine[Any, Any, R]]) -> R:
        """Run ``callback(session)`` in a transaction, again after transient errors, within ``timeout``."""
        async with self.client.start_session() as session:
            with pymongo.timeout(self.timeout):
                return await session.with_transaction(
                    callback,
                    read_concern=ReadConcern("snapshot"),
                    write_concern=WriteConcern(w="majority", j=True),
                    read_preference=ReadPreference.PRIMARY,
                )

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncClientSession]:
        """A session inside one transaction, committed at the end of the block and aborted by an error."""
        async with self.client.start_session() as session, await session.start_transaction():
            yield session

    def error(self, doing: str, error: PyMongoError) -> StoreError:
        """The StoreError that a driver error becomes."""
        if isinstance(error, OperationFailure) and error.code in _AUTHENTICATION_CODES:
            return StoreDeniedError(
                f"{doing}: MongoDB at {self.host} refused the user: {error.details or error}",
                hint="check user, password and authSource in --db_connection_string",
            )
        if isinstance(error, OperationFailure) and error.code in _DISK_FULL_CODES:
            return StoreAwayError(
                f"{doing}: the disk of MongoDB at {self.host} is full", hint="free some space"
            )
        unreachable = isinstance(error, (ServerSelectionTimeoutError, NetworkTimeout, ExecutionTimeout))
        passing = any(error.has_error_label(label) for label in _PASSING_LABELS)
        passing = passing or (isinstance(error, OperationFailure) and error.code == _KEY_NOT_FOUND)
        passing = passing or (isinstance(error, ConfigurationError) and _NO_SESSIONS in str(error))
        if unreachable or passing or error.timeout or isinstance(error, pymongo.errors.ConnectionFailure):
            return StoreAwayError(
                f"{doing}: MongoDB at {self.host} did not answer within {self.timeout:g} s"
                f" ({type(error).__name__})",
                hint="start it (the embedded one: agentrl mongo up), or check --db_connection_string;"
                " --db_wait_seconds says how long a process waits for it",
            )
        refused = refusal(error)
        if refused is not None:
            return StoreError(
                f"{doing}: {refused}", hint="is another version of AgentRL writing to this run?"
            )
        return StoreError(f"{doing}: MongoDB at {self.host} refused: {error}")

    async def patiently(self, operation: Callable[[], Awaitable[R]], doing: str) -> R:
        """Call ``operation``, again while the database is away and ``patient`` allows. Raises StoreErrors."""

        def failure(error: Exception) -> StoreError:
            if isinstance(error, StoreAwayError):
                return error
            if isinstance(error, PyMongoError):
                return self.error(doing, error)
            if isinstance(error, UNENCODABLE):
                return StoreError(f"{doing}: no document can hold this: {type(error).__name__}: {error}")
            raise error

        return await retry_while_away(operation, failure, self.outage)

    async def close(self) -> None:
        """Close the client."""
        await self.client.close()


class Connected(Protocol):
    """What the parts of the store have in common."""

    _connection: Connection


class Part:
    """A part of the store: the calls on one collection or one concern."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _collection(self, name: str) -> AsyncCollection[Json]:
        return self._connection.collection(name)


S = TypeVar("S", bound=Connected)


def database_call(
    method: Callable[Concatenate[S, P], Awaitable[R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Make driver errors of a public method StoreErrors that name what was being done; see ``patient``."""
    doing = method.__qualname__.lower().replace("_", " ").replace(".", ": ")

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._connection.patiently(lambda: method(self, *args, **kwargs), doing)

    return call


def _host(uri: str) -> str:
    try:
        nodes = parse_uri(uri, validate=False)["nodelist"]
    except (PyMongoError, ValueError):
        return uri.rpartition("@")[2].partition("/")[0] if "@" in uri else "the address given"
    return ",".join(f"{host}:{port}" for host, port in nodes)


def _uri_error(error: Exception) -> StoreError:
    return StoreError(
        f"--db_connection_string is no MongoDB URI: {error}",
        hint="write mongodb://USER:PASSWORD@HOST:PORT/?replicaSet=NAME, user and password percent-encoded",
    )
