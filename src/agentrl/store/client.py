"""The store of one run: opens its database and holds its parts."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import PyMongoError

from agentrl.config.schema import RunConfig
from agentrl.errors import StoreError
from agentrl.store.claims import Claims
from agentrl.store.connection import Connection
from agentrl.store.dispatches import Dispatches
from agentrl.store.embedded import EmbeddedMongo
from agentrl.store.indexes import prepare
from agentrl.store.policies import Policies
from agentrl.store.records import Records
from agentrl.store.services import Services
from agentrl.store.tasks import Tasks
from agentrl.store.training import Training
from agentrl.store.waiting import Changes


class Store:
    """The database of one run. Every call is bounded by ``--db_timeout_seconds`` and raises StoreError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.run_name = connection.database.name
        self.tasks = Tasks(connection)
        self.claims = Claims(connection)
        self.records = Records(connection)
        self.dispatches = Dispatches(connection)
        self.training = Training(connection)
        self.policies = Policies(connection)
        self.services = Services(connection)
        self._changes = Changes(connection)

    @property
    def host(self) -> str:
        """The server's address, without credentials."""
        return self._connection.host

    @property
    def database(self) -> AsyncDatabase[dict[str, Any]]:
        """The run's database, for reading what the parts have no call for."""
        return self._connection.database

    def transaction(self) -> AbstractAsyncContextManager[AsyncClientSession]:
        """A session inside one transaction, committed at the end of the block; it is not retried."""
        return self._connection.session()

    async def wait_for_change(self, *collections: str, timeout: float) -> None:
        """Return after a change in one of ``collections``, or after ``timeout`` seconds."""
        await self._changes.wait(*collections, timeout=timeout)

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
    Raises StoreError where the server cannot be reached, is older than 6.0, or has no transactions.
    """
    uri = run.db_connection_string
    if uri is None:
        uri = await asyncio.to_thread(_embedded_uri, run.mongo_dir)
    connection = Connection(uri, run.run_name, run.db_timeout_seconds)
    try:
        await connection.check()
        await prepare(connection.database)
    except PyMongoError as error:
        await connection.close()
        raise connection.error("preparing the database", error) from error
    except BaseException:
        await connection.close()
        raise
    return Store(connection)


def _embedded_uri(directory: str) -> str:
    status = EmbeddedMongo(directory).status()
    if not status.running:
        raise StoreError(
            f"no embedded MongoDB is running under {status.directory}",
            cure="start it: agentrl mongo up; or name a server of yours with --db_connection_string",
        )
    return status.uri
