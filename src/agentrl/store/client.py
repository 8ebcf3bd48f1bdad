"""Open the database of one run; ``Store`` has a repository for each collection or concern."""

from __future__ import annotations

import asyncio
import difflib
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import PyMongoError

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError, RunMissingError, StoreError
from agentrl.store.claims import Claims, ExpiredLeases
from agentrl.store.epochs import Epochs
from agentrl.store.evaluations import Evaluations, JudgeChecks
from agentrl.store.gateways import Conversations, Gateways, Labels
from agentrl.store.groups import Columns, Groups
from agentrl.store.mechanics.change_stream import Changes
from agentrl.store.mechanics.connection import DATABASE_SERVERS, TASK, Connection, LocalServer, RunFence
from agentrl.store.mechanics.retry import PastOutage
from agentrl.store.mixture import Mixtures
from agentrl.store.model_calls import Images, ModelCalls
from agentrl.store.policy_versions import PolicyVersions, TrainerLeases
from agentrl.store.records import Attempts, Records
from agentrl.store.schema import holds_run, open_schema
from agentrl.store.services import OutageRecords, Samplers, Services
from agentrl.store.settings import Ancestry, Imports, Settings, Withdrawals
from agentrl.store.steps import Steps, Training
from agentrl.store.tasks import Tasks

logger = logging.getLogger(__name__)

_RUNS_SHOWN = 20


class Store:
    """The database of one run. Each call takes at most ``--db_timeout_seconds`` and raises StoreErrors."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.run_name = connection.database.name
        self.epochs = Epochs(connection)
        self.tasks = Tasks(connection, self.epochs)
        self.mixtures = Mixtures(connection)
        self.attempts = Attempts(connection)
        self.expired_leases = ExpiredLeases(connection, self.attempts.completed)
        self.claims = Claims(connection, self.expired_leases)
        self.records = Records(connection)
        self.model_calls = ModelCalls(connection)
        self.groups = Groups(connection)
        self.columns = Columns(connection)
        self.training = Training(connection)
        self.steps = Steps(connection)
        self.policy_versions = PolicyVersions(connection)
        self.services = Services(connection)
        self.samplers = Samplers(connection)
        self.trainer_lease = TrainerLeases(connection)
        self.outages = OutageRecords(connection)
        self.imports = Imports(connection)
        self.settings = Settings(connection)
        self.ancestry = Ancestry(connection)
        self.withdrawals = Withdrawals(connection)
        self.evaluations = Evaluations(connection)
        self.judge_checks = JudgeChecks(connection)
        self.gateways = Gateways(connection)
        self.conversations = Conversations(connection)
        self.images = Images(connection)
        self.labels = Labels(connection)
        self._changes = Changes(connection)

    @property
    def host(self) -> str:
        """Return the server's address, without credentials."""
        return self._connection.host

    @property
    def database(self) -> AsyncDatabase[dict[str, Any]]:
        """Return the run's database. Only tests use it: other calls belong in a repository."""
        return self._connection.database

    @property
    def connection(self) -> Connection:
        """Return the connection, for the repositories that wings make of it."""
        return self._connection

    @property
    def seconds_since_outage(self) -> float:
        """Return the seconds since the database was last unavailable; 0 while it is, infinite if never."""
        return self._connection.outage.seconds_since

    def take_past_outages(self) -> list[PastOutage]:
        """Return the outages of the database that this process saw end since the last call."""
        return self._connection.outage.take_past()

    async def wait_for_change(self, *collections: str, timeout: float) -> bool:
        """Return True after a change in one of ``collections``, False after ``timeout`` seconds.

        Of Tasks and data, only insertions and status changes count.
        """
        return await self._changes.wait(*collections, timeout=timeout)

    def beside(self, run_name: str) -> Store:
        """Return the store of a relative of this run, for reading alone; this store closes it."""
        return Store(self._connection.beside(run_name))

    async def holding(self, collection: str, key: str) -> Store | None:
        """Return the store of the run that holds a document: this one or an ancestor's; None if none does."""
        name = await self.ancestry.holder(collection, key)
        if name is None or name == self.run_name:
            return None if name is None else self
        return self.beside(name)

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
    """Connect to the run's database and create or update its schema. Starts no server.

    Without ``--db_connection_string`` it connects to the embedded server under ``--mongo_dir``, which must be
    running. Raises StoreError if the server cannot be reached, is older than 6.0 or has no transactions, or
    if the run has another schema version.
    """
    async with _connected(run, "preparing the database") as connection:
        await connection.call(lambda: _check_name(connection), "looking for the run")
        schema = await connection.call(lambda: open_schema(connection.database), "preparing the database")
        connection.fence = RunFence(connection.database, schema)
        return Store(connection)


async def open_existing(run: RunConfig) -> Store:
    """Connect to an existing run; write nothing. If there is none, the StoreError lists the existing runs.

    Otherwise raises as ``open_store``.
    """
    async with _connected(run, "opening the run") as connection:
        if not await _has_tasks(connection.database):
            raise await _no_run(connection)
        schema = await holds_run(connection.database)
        connection.fence = RunFence(connection.database, schema or {})
        return Store(connection)


async def open_connection(run: RunConfig) -> Connection:
    """Connect to the server; the run need not exist. Writes nothing."""
    async with _connected(run, "connecting") as connection:
        await _check_name(connection)
        return connection


async def run_exists(run: RunConfig) -> bool:
    """Return whether the run's database exists. Writes nothing.

    Raises as ``open_store``, but does not check the right to create collections.
    """
    async with _connected(run, "looking for the run") as connection:
        await _check_name(connection)
        exists = await _has_tasks(connection.database)
        if exists:
            await holds_run(connection.database)
        await connection.close()
        return exists


@asynccontextmanager
async def _connected(run: RunConfig, doing: str) -> AsyncIterator[Connection]:
    """Yield a checked connection; close it if the block raises."""
    if run.db_connection_string is not None:
        connection = Connection(run.db_connection_string, run.run_name, run.db_timeout_seconds)
    else:
        # Ask in a thread: it reads the server's files, and their disk may be slow.
        server = await asyncio.to_thread(_embedded_server, run.mongo_dir)
        connection = Connection(server.uri, run.run_name, run.db_timeout_seconds, server.explain)
    try:
        await connection.call(connection.check, doing)
        yield connection
    except PyMongoError as error:
        await connection.close()
        raise connection.error(doing, error) from error
    # Close it also where the opening is cancelled: the client's monitors would go on.
    except BaseException:
        await connection.close()
        raise


async def _check_name(connection: Connection) -> None:
    """Raise ConfigError if a database name differs from the run's only in case, which MongoDB refuses."""
    wanted = connection.database.name
    # Use the name as a pattern as it is: --run_name has only letters, digits, '_' and '-'.
    listed = await connection.client.admin.command(
        "listDatabases", nameOnly=True, filter={"name": {"$regex": f"^{wanted}$", "$options": "i"}}
    )
    names = [database["name"] for database in listed["databases"]]
    if names and wanted not in names:
        raise ConfigError(
            f"--run_name is {wanted!r}, and MongoDB at {connection.host} has a database {names[0]!r}: names"
            " must differ in more than case",
            hint=f"give --run_name {names[0]} to go on with that run, or another name",
        )


async def _has_tasks(database: AsyncDatabase[dict[str, Any]]) -> bool:
    return bool(await database.list_collection_names(filter={"name": TASK}))


async def _no_run(connection: Connection) -> RunMissingError:
    runs = [name for name in await connection.databases() if await _has_tasks(connection.client[name])]
    shown = ", ".join(runs[:_RUNS_SHOWN]) + (", …" if len(runs) > _RUNS_SHOWN else "")
    wanted = connection.database.name
    nearest = difflib.get_close_matches(wanted, runs, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return RunMissingError(
        f"there is no run {wanted!r} on MongoDB at {connection.host}",
        hint=f"{hint}runs: {shown}" if runs else "there are no runs on it: check --db_connection_string",
    )


def _embedded_server(directory: str) -> LocalServer:
    """Return the embedded server of a folder. Raises StoreError if it does not run, and if there is none."""
    # Ask by name: the embedded server belongs to a wing that may not be installed.
    find = DATABASE_SERVERS.known().get("embedded")
    if find is None:
        raise StoreError(
            "no database is named, and this installation has no embedded MongoDB",
            hint="name your server with MONGO_URI or --db_connection_string",
        )
    return find(directory)


@asynccontextmanager
async def scratch_store(run: RunConfig, prefix: str) -> AsyncIterator[Store]:
    """Open the store of a new database on the server of ``run``, and drop it at the end.

    Its name is ``prefix`` and 12 random digits; a process that is killed leaves it. Raises the StoreErrors of
    ``open_store``.
    """
    name = f"{prefix}_{secrets.token_hex(6)}"
    async with await open_store(replace(run, run_name=name)) as store:
        try:
            yield store
        finally:
            try:
                await store.connection.client.drop_database(name)
            except PyMongoError as error:
                logger.warning("database %s is left, and may be dropped by hand: %s", name, error)
