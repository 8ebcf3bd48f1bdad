"""Change streams: how many a machine has, what wakes them, and what happens when their owner ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pymongo.monitoring
import pytest
from test_store_claims import make_tasks, take_one
from test_store_training import make_call

from agentrl.config.schema import RunConfig
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import RecordStatus
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics import change_stream

pytestmark = pytest.mark.integration

PROCESSES = 6
_LEADER = """
import asyncio, sys
from agentrl.config.schema import RunConfig
from agentrl.store.client import open_store

async def main():
    run = RunConfig(run_name=sys.argv[1], db_connection_string=sys.argv[2])
    async with await open_store(run) as store:
        await store.wait_for_change("Task", timeout=30)
        print("leads", flush=True)
        while True:
            await store.wait_for_change("Task", timeout=30)

asyncio.run(main())
"""


class Streams(pymongo.monitoring.CommandListener):
    """Counts the change streams that were opened, and the changes that the server sent to them."""

    def __init__(self) -> None:
        self.opened = 0
        self.changes = 0

    def started(self, event: pymongo.monitoring.CommandStartedEvent) -> None:
        """Count a stream."""
        if "$changeStream" in str(event.command.get("pipeline", ""))[:40]:
            self.opened += 1

    def succeeded(self, event: pymongo.monitoring.CommandSucceededEvent) -> None:
        """Count changes."""
        cursor: dict[str, Any] = event.reply.get("cursor", {})
        if "postBatchResumeToken" in cursor:
            self.changes += len(cursor.get("nextBatch", []))

    def failed(self, event: pymongo.monitoring.CommandFailedEvent) -> None:
        """Nothing is kept of failures."""


STREAMS = Streams()
pymongo.monitoring.register(STREAMS)


@pytest.fixture
async def stores(run_config: RunConfig) -> AsyncIterator[list[Store]]:
    """The stores of several processes of one machine, which wait for changes."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(await open_store(run_config)) for _ in range(PROCESSES)]
        yield opened
        await opened[-1].database.client.drop_database(run_config.run_name)


async def all_wake(stores: list[Store], number: int) -> bool:
    """Whether a new Task wakes every store."""
    for store in stores:
        while await store.wait_for_change("Task", timeout=0.3):
            pass
    waiting = [asyncio.create_task(wait_until(store, "Task")) for store in stores]
    await asyncio.sleep(0)
    await stores[0].tasks.load(make_tasks(number)[-1:])
    return all(await asyncio.gather(*waiting))


async def wait_until(store: Store, collection: str) -> bool:
    return await store.wait_for_change(collection, timeout=30)


async def test_processes_of_a_machine_share_one_stream_and_each_wakes(stores: list[Store]) -> None:
    STREAMS.opened = 0
    assert await all_wake(stores, 1)
    assert STREAMS.opened == 1
    await stores[0].close()
    assert await all_wake(stores[1:], 2)
    assert STREAMS.opened == 2


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_leads_when_its_leader_is_killed_and_polls_when_it_is_frozen(
    store: Store, run_config: RunConfig, mongo_uri: str, monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    leader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _LEADER, run_config.run_name, mongo_uri, stdout=asyncio.subprocess.PIPE
    )
    assert leader.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await leader.stdout.readline() == b"leads\n"
        STREAMS.opened = 0
        assert await all_wake([store], 1)
        assert STREAMS.opened == 0
        monkeypatch.setattr(change_stream, "SILENT_SECONDS", 0.3)
        os.kill(leader.pid, end)
        assert await store.wait_for_change("Task", timeout=30)
        if end == signal.SIGKILL:
            assert await all_wake([store], 2)
        assert STREAMS.opened == (1 if end == signal.SIGKILL else 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader.pid, signal.SIGKILL)
        await leader.wait()


async def test_a_stream_carries_no_renewal_no_model_call_and_no_reserved_version(stores: list[Store]) -> None:
    store, other = stores[:2]
    await store.tasks.load(make_tasks(2))
    claim = await take_one(store, "a")
    await store.records.create(claim)
    await store.records.advance(claim, RecordStatus.RUNNING)
    names = ("Task", "DBRecordData", "TrainStep", "PolicyVersion")
    while await other.wait_for_change(*names, timeout=0.5):
        pass
    STREAMS.changes = 0
    for number in range(5):
        await store.claims.heartbeat([claim], 60)
        await store.model_calls.add(claim, make_call(claim, number))
    await take_one(store, "b")
    version = PolicyVersion(id=1, step=1, location="/weights/v000001", files=(), train_step=None)
    await store.policy_versions.reserve(version)
    await store.policy_versions.reserve(version)  # a trainer that starts again replaces it
    assert not await other.wait_for_change(*names, timeout=0.5)
    assert STREAMS.changes == 0
    await store.policy_versions.publish(version)
    assert await other.wait_for_change(*names, timeout=30)
    assert STREAMS.changes == 1
    await store.tasks.load(make_tasks(3))
    assert await other.wait_for_change(*names, timeout=30)
    assert STREAMS.changes == 2
