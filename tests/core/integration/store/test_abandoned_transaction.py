"""A process that is killed in a transaction does not keep others from what it wrote for long."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest

from agentrl.store.mechanics.connection import Connection
from agentrl.store.mechanics.retry import retry_outages

pytestmark = pytest.mark.integration

KILLED_IN_A_TRANSACTION = """
import asyncio, os, signal, sys
from agentrl.store.mechanics.connection import Connection
async def main():
    connection = Connection(sys.argv[1], "abandoned", 10.0)
    async with connection.client.start_session() as session, await session.start_transaction():
        await connection.collection("items").update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


LIMIT = "transactionLifetimeLimitSeconds"


@pytest.fixture
async def connection(mongo_uri: str) -> AsyncIterator[Connection]:
    """A connection to a server whose limit, which must be low, is 2 s for the test."""
    connection = Connection(mongo_uri, "abandoned", 5.0)
    admin = connection.client.admin
    limit = (await admin.command("getParameter", 1, **{LIMIT: 1}))[LIMIT]
    assert limit == 15
    await admin.command("setParameter", 1, **{LIMIT: 2})
    yield connection
    await admin.command("setParameter", 1, **{LIMIT: limit})
    await connection.client.drop_database("abandoned")
    await connection.close()


async def test_what_a_killed_process_held_is_free_soon(connection: Connection, mongo_uri: str) -> None:
    items = connection.collection("items")
    await items.insert_one({"_id": 1, "n": 0})
    command = [sys.executable, "-c", KILLED_IN_A_TRANSACTION, mongo_uri]
    process = await asyncio.create_subprocess_exec(*command)
    assert await asyncio.wait_for(process.wait(), 60) == -9
    with retry_outages(45):
        await connection.call(lambda: items.update_one({"_id": 1}, {"$inc": {"n": 10}}), "writing")
    assert await items.find_one({}) == {"_id": 1, "n": 10}
