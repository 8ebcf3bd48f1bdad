"""A replica set whose primary is killed with writes of its own: what was acknowledged is there afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.database import ReplicaSet

from agentrl.errors import StoreUnavailableError
from agentrl.store.mechanics.connection import Connection

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[ReplicaSet]:
    made = ReplicaSet(tmp_path, members=3)
    made.up()
    yield made
    made.down()


async def test_what_was_acknowledged_survives_a_primary_that_dies_alone(replicas: ReplicaSet) -> None:
    connection = Connection(replicas.uri, "survival", 10.0)
    numbers = connection.collection("numbers")
    acknowledged: list[int] = []
    stop = asyncio.Event()

    async def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                document = {"_id": number}
                await connection.call(lambda document=document: numbers.insert_one(document), "writing")
            except StoreUnavailableError:
                continue
            acknowledged.append(number)

    writing = asyncio.create_task(write())
    while len(acknowledged) < 20:
        await asyncio.wait([writing], timeout=0.02)
    killed = await asyncio.to_thread(replicas.kill_primary, 0.5)
    assert await asyncio.to_thread(replicas.primary) != killed
    await asyncio.to_thread(replicas.start_member, killed)
    before = len(acknowledged)
    while len(acknowledged) < before + 20:
        await asyncio.wait([writing], timeout=0.02)
    stop.set()
    await writing
    stored = {document["_id"] async for document in numbers.find({})}
    assert set(acknowledged) <= stored
    await connection.close()
