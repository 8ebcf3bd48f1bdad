"""The store of one run: opens its database and holds its parts."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import PyMongoError

from agentrl.config.run import SYSTEM_DATABASES
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.store.admin.migrate import check_version, open_schema
from agentrl.store.changes import Changes
from agentrl.store.claims import Claims
from agentrl.store.connection import Connection
from agentrl.store.embedded.server import EmbeddedMongo
from agentrl.store.imports import Imports
from agentrl.store.model_calls import ModelCalls
from agentrl.store.names import TASK
from agentrl.store.policy_versions import PolicyVersions
from agentrl.store.records import Records
from agentrl.store.services import Services
from agentrl.store.settings import Settings
from agentrl.store.tasks import Tasks
from agentrl.store.trainer_lease import TrainerLeases
from agentrl.store.training import Training
from agentrl.store.views.read import Views

_RUNS_SHOWN = 20


class Store:
    """The database of one run. Every call is bounded by ``--db_timeout_seconds`` and raises StoreError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.run_name = connection.database.name
        self.tasks = Tasks(connection)
        self.claims = Claims(connection)
        self.records = Records(connection)
        self.model_calls = ModelCalls(connection)
        self.training = Training(connection)
        self.policy_versions = PolicyVersions(connection)
        self.services = Services(connection)
        self.trainer_lease = TrainerLeases(connection)
        self.imports = Imports(connection)
        self.settings = Settings(connection)
        self.views = Views(connection)
        self._changes = Changes(connection)

    @property
    def host(self) -> str:
        """The server's address, without credentials."""
        return self._connection.host

    @property
    def database(self) -> AsyncDatabase[dict[str, Any]]:
        """The run's database, for reading what the parts have no call for, inside ``reading``."""
        return self._connection.database

    @property
    def connection(self) -> Connection:
        """The connection, for the parts that only ``agentrl db`` has."""
        return self._connection

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Make what the driver raises in the block, while reading ``database``, a StoreError."""
        try:
            yield
        except PyMongoError as error:
            raise self._connection.error(what, error) from error

    def transaction(self) -> AbstractAsyncContextManager[AsyncClientSession]:
        """A session inside one transaction, committed at the end of the block; it is not retried."""
        return self._connection.session()

    async def wait_for_change(self, *collections: str, timeout: float) -> bool:
        """Return True after a change in one of ``collections``, False after ``timeout`` seconds without.

        Only changes that may make work count: a Task's when it is new or in another state.
        """
        return await self._changes.wait(*collections, timeout=timeout)

    async def close(self) -> None:
        """Close the connection."""
        await self._changes.close()
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def open_store(run: RunConfig) -> Store:
    """Connect to the run's database and make its schema. Starts no server.

    Without ``--db_connection_string`` it is the embedded server under ``--mongo_dir``, which must be up.
    Raises StoreError where the server cannot be reached, is older than 6.0, or has no transactions, and where
    the run's schema is of another version than this code's.
    """
    async with _connected(run, "preparing the database") as connection:
        await connection.call(lambda: _check_name(connection), "looking for the run")
        await connection.call(lambda: open_schema(connection.database), "preparing the database")
        return Store(connection)


async def open_existing(run: RunConfig, *, any_version: bool = False) -> Store:
    """Connect to a run that exists; nothing is written. StoreError lists the runs there are otherwise.

    Its schema must be this code's version unless ``any_version``. What else fails is as for ``open_store``.
    """
    async with _connected(run, "opening the run") as connection:
        if not await connection.database.list_collection_names(filter={"name": TASK}):
            raise await _no_run(connection)
        if not any_version:
            await check_version(connection.database)
        return Store(connection)


async def open_connection(run: RunConfig) -> Connection:
    """Connect to the server of a run that need not exist; nothing is written."""
    async with _connected(run, "connecting") as connection:
        await _check_name(connection)
        return connection


async def run_exists(run: RunConfig) -> bool:
    """Look whether the run's database is there; nothing is written.

    Raises as ``open_store``, but for rights: what ``open_store`` would create may still be refused.
    """
    async with _connected(run, "looking for the run") as connection:
        await _check_name(connection)
        exists = bool(await connection.database.list_collection_names(filter={"name": TASK}))
        if exists:
            await check_version(connection.database)
        await connection.close()
        return exists


@asynccontextmanager
async def _connected(run: RunConfig, doing: str) -> AsyncIterator[Connection]:
    """A checked connection, which an error in the block closes."""
    uri = run.db_connection_string
    if uri is None:
        uri = await asyncio.to_thread(_embedded_uri, run.mongo_dir)
    connection = Connection(uri, run.run_name, run.db_timeout_seconds)
    try:
        await connection.call(connection.check, doing)
        yield connection
    except PyMongoError as error:
        await connection.close()
        raise connection.error(doing, error) from error
    except BaseException:
        await connection.close()
        raise


async def _check_name(connection: Connection) -> None:
    """Raise ConfigError where a database's name differs from the run's in case alone, as MongoDB refuses."""
    wanted = connection.database.name
    found = await connection.client.admin.command(
        "listDatabases", nameOnly=True, filter={"name": {"$regex": f"^{wanted}$", "$options": "i"}}
    )
    names = [database["name"] for database in found["databases"]]
    if names and wanted not in names:
        raise ConfigError(
            f"--run_name is {wanted!r}, and MongoDB at {connection.host} has a database {names[0]!r}: names"
            " must differ in more than case",
            hint=f"give --run_name {names[0]} to go on with that run, or another name",
        )


async def _no_run(connection: Connection) -> StoreError:
    names = await connection.client.list_database_names()
    runs = [
        name
        for name in sorted(set(names) - SYSTEM_DATABASES)
        if await connection.client[name].list_collection_names(filter={"name": TASK})
    ]
    shown = ", ".join(runs[:_RUNS_SHOWN]) + (", …" if len(runs) > _RUNS_SHOWN else "")
    wanted = connection.database.name
    nearest = difflib.get_close_matches(wanted, runs, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return StoreError(
        f"there is no run {wanted!r} on MongoDB at {connection.host}",
        hint=f"{hint}runs: {shown}" if runs else "there are no runs on it: mind --db_connection_string",
    )


def _embedded_uri(directory: str) -> str:
    status = EmbeddedMongo(directory).status()
    if not status.running:
        raise StoreError(
            f"no embedded MongoDB is running under {status.directory}",
            hint="start it: agentrl mongo up; or name a server of yours with --db_connection_string",
        )
    return status.uri
