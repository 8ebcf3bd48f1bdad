"""Connect to the database of one run: time limits, server checks, transactions and error conversion."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pymongo
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import ConfigurationError, DuplicateKeyError, InvalidURI, PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.uri_parser import parse_uri
from pymongo.write_concern import WriteConcern

from agentrl.documents.base import Document, follow_clock
from agentrl.errors import StoreError, StoreUnavailableError
from agentrl.store.driver_errors import ENCODING_ERRORS, encoding_error, store_error, uri_error
from agentrl.store.embedded.server import disk_problem
from agentrl.store.retry import OutageLog, retry_while_unavailable

Json = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")

CONNECTIONS = 32
"""Maximum size of a process's connection pool; operations wait for a free connection. Two more connections
monitor the server."""
_BEFORE_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_IDLE_MS = 300_000
_MIN_VERSION = (6, 0)


class Connection:
    """A client whose operations each take at most ``timeout`` seconds.

    Writes are journaled by a majority of the replica set. Reads return only what a majority has, so that the
    loss of a primary never undoes what was read. ``host`` is the address without credentials: it is safe to
    show. ``folder`` is that of the embedded server, whose full disk errors then name.
    """

    def __init__(self, uri: str, database: str, timeout: float, folder: Path | None = None) -> None:
        self.timeout = timeout
        self.outage = OutageLog()
        self.opened_at = time.monotonic()
        self.host = _host(uri)
        self._folder = folder
        milliseconds = max(1, int(timeout * 1000))
        try:
            self.client: AsyncMongoClient[Json] = AsyncMongoClient(
                uri, tz_aware=True, appname="agentrl", w="majority", journal=True, retryWrites=True,
                retryReads=True, readConcernLevel="majority", serverSelectionTimeoutMS=milliseconds,
                connectTimeoutMS=milliseconds, timeoutMS=milliseconds,
                maxPoolSize=CONNECTIONS, maxIdleTimeMS=_IDLE_MS,
            )  # fmt: skip
        except (ConfigurationError, InvalidURI, ValueError) as error:
            raise uri_error(error) from error
        self.database: AsyncDatabase[Json] = self.client[database]

    def collection(self, name: str) -> AsyncCollection[Json]:
        """Return a collection of this run."""
        return self.database[name]

    async def server_time(self) -> datetime:
        """Return the time of the server's clock."""
        moment: datetime = (await self.client.admin.command("hello"))["localTime"]
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
        if "setName" not in hello and hello.get("msg") != "isdbgrid":
            raise StoreError(
                f"MongoDB at {self.host} is a standalone server, without transactions and change streams",
                hint="for a replica set of one, start mongod with --replSet agentrl (and --keyFile FILE if"
                " it has --auth), then once: mongosh --eval 'rs.initiate()' (docs/coming_from.md); or use"
                " deploy/mongo/docker-compose.yml",
            )

    async def transaction(self, callback: Callable[[AsyncClientSession], Coroutine[Any, Any, R]]) -> R:
        """Run ``callback(session)`` in a transaction; retry it after transient errors, within ``timeout``."""
        async with self.client.start_session() as session:
            with pymongo.timeout(self.timeout):
                return await session.with_transaction(
                    callback,
                    read_concern=ReadConcern("snapshot"),
                    write_concern=WriteConcern(w="majority", j=True),
                    read_preference=ReadPreference.PRIMARY,
                )

    def error(self, doing: str, error: PyMongoError) -> StoreError:
        """Return the StoreError for a driver error that was raised while ``doing``."""
        found = store_error(doing, error, self.host, self.timeout)
        if self._folder is None or not isinstance(found, StoreUnavailableError):
            return found
        problem = disk_problem(self._folder)
        return (
            found
            if problem is None
            else StoreUnavailableError(f"{doing}: {problem.message}", hint=problem.hint)
        )

    async def call(self, operation: Callable[[], Awaitable[R]], doing: str) -> R:
        """Call ``operation``; retry it during an outage as ``retry_outages`` allows. Raises StoreErrors."""

        def to_store_error(error: Exception) -> StoreError:
            if isinstance(error, StoreUnavailableError):
                return error
            if isinstance(error, PyMongoError):
                return self.error(doing, error)
            if isinstance(error, ENCODING_ERRORS):
                return encoding_error(doing, error)
            raise error

        return await retry_while_unavailable(operation, to_store_error, self.outage)

    async def close(self) -> None:
        """Close the client."""
        await self.client.close()


class Repository:
    """Base class: the database calls on one collection or for one concern."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _collection(self, name: str) -> AsyncCollection[Json]:
        return self._connection.collection(name)


S = TypeVar("S", bound=Repository)


def database_call(
    method: Callable[Concatenate[S, P], Awaitable[R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Decorate a public method: convert driver errors to StoreErrors and retry as ``retry_outages`` allows.

    The method's name begins the message: ``PolicyVersions.by_ids`` becomes "policy versions: by ids".
    """
    doing = _BEFORE_CAPITAL.sub(" ", method.__qualname__).lower().replace("_", " ").replace(".", ": ")

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._connection.call(lambda: method(self, *args, **kwargs), doing)

    return call


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
