"""Epochs on a real server: each is opened once, whole, whoever dies meanwhile, and a check says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pymongo.monitoring
import pytest
from db_command import check
from test_store_claims import make_tasks

from agentrl.config.schema import RunConfig
from agentrl.data.stream import DataStream, Freshness, StreamSettings
from agentrl.documents.status import EpochStatus
from agentrl.store import epochs, tasks
from agentrl.store.client import Store, open_store

pytestmark = pytest.mark.integration

TASKS, BATCH = 30, 4

DIE = """
import asyncio, os, signal, sys
import pymongo.monitoring
from agentrl.config.schema import RunConfig
from agentrl.store import epochs, tasks
from agentrl.store.client import open_store

epochs._BATCH = tasks._BATCH = {batch}
writes = 0

class DieBeforeTheThirdBatch(pymongo.monitoring.CommandListener):
    def started(self, event):
        global writes
        stages = event.command.get("pipeline", [{{}}])
        writes += event.command.get("insert") == "Task" or "$merge" in stages[-1]
        if writes == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    def succeeded(self, event): pass
    def failed(self, event): pass

pymongo.monitoring.register(DieBeforeTheThirdBatch())
from test_store_claims import make_tasks

async def main():
    async with await open_store(RunConfig(run_name={name!r}, db_connection_string={uri!r})) as store:
        await {call}

asyncio.run(main())
"""


class Inserted(pymongo.monitoring.CommandListener):
    """Counts how often each Task of epochs after 0 is inserted into one database."""

    def __init__(self) -> None:
        self.database: str | None = None
        self.times: Counter[str] = Counter()

    def started(self, event: pymongo.monitoring.CommandStartedEvent) -> None:
        """Count the tasks of a batch."""
        if event.database_name != self.database:
            return
        stages: list[Any] = event.command.get("pipeline", [{}])
        if "$merge" in stages[-1]:
            self.times.update(stages[0]["$match"]["_id"]["$in"])
        elif event.command.get("insert") == "Task":
            self.times.update(task["_id"] for task in event.command["documents"])

    def succeeded(self, event: pymongo.monitoring.CommandSucceededEvent) -> None:
        """Nothing is kept of answers."""

    def failed(self, event: pymongo.monitoring.CommandFailedEvent) -> None:
        """Nothing is kept of answers."""


INSERTED = Inserted()
pymongo.monitoring.register(INSERTED)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every opening take several batches."""
    for module in (epochs, tasks):
        monkeypatch.setattr(module, "_BATCH", BATCH)


@pytest.fixture
async def four(store: Store, run_config: RunConfig) -> AsyncIterator[list[Store]]:
    """Four clients of one run, as of four processes; what they insert is counted."""
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(await open_store(run_config)) for _ in range(3)]
        INSERTED.times.clear()
        INSERTED.database = store.run_name
        yield [store, *others]
        INSERTED.database = None


async def die_in(call: str, run: RunConfig) -> None:
    """A process that makes ``call`` and is killed with SIGKILL before its third batch."""
    code = DIE.format(batch=BATCH, name=run.run_name, uri=run.db_connection_string, call=call)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # pytest's: with the tests' helpers
    process = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], timeout=60, capture_output=True, text=True,
        env=environment,
    )  # fmt: skip
    assert process.returncode == -signal.SIGKILL, process.stderr


async def end_lease(store: Store, key: str) -> None:
    """Let the lease of an opening end now, by the server's clock."""
    result = await store.database["Epoch"].update_one(
        {"_id": key, "owner": {"$ne": None}}, [{"$set": {"lease_expires_at": "$$NOW"}}]
    )
    assert result.matched_count == 1


async def names(store: Store, epoch: int) -> list[str]:
    """The tasks of an epoch in its order."""
    return [task.task_id for task in await store.tasks.find("train") if task.epoch == epoch]


async def problems(store: Store, *, is_final: bool = False) -> list[str]:
    report = await check(store, is_final=is_final)
    return [str(violation.problem) for violation in report.violations if violation.invariant == 6]


async def test_four_openers_insert_each_task_once(four: list[Store]) -> None:
    await four[0].tasks.load(make_tasks(TASKS))
    INSERTED.times.clear()
    opened = await asyncio.gather(*(store.epochs.open("train", 1, 0, 4) for store in four))
    assert sorted(opened) == [0, 0, 0, TASKS]
    assert set(INSERTED.times.values()) == {1}
    assert len(INSERTED.times) == TASKS
    assert await four[0].epochs.next("train", 2) is None


async def test_four_loads_insert_each_task_once(four: list[Store]) -> None:
    loaded = await asyncio.gather(*(store.tasks.load(make_tasks(TASKS)) for store in four))
    assert sorted(result.inserted for result in loaded) == [0, 0, 0, TASKS]
    assert set(INSERTED.times.values()) == {1}
    assert len(INSERTED.times) == TASKS


async def test_a_killed_opening_is_taken_over_and_completed_in_its_order(
    store: Store, run_config: RunConfig
) -> None:
    await store.tasks.load(make_tasks(TASKS))
    await die_in('store.epochs.open("train", 1, 7, 4)', run_config)
    begun = await names(store, 1)
    assert len(begun) == 2 * BATCH
    assert await store.epochs.next("train", 1) == 1
    assert await store.epochs.open("train", 1, 7, 4) == 0
    assert await store.epochs.open("train", 2, 7, 4) == 0
    assert await problems(store) == []
    assert any("Epoch train/1" in text for text in await problems(store, is_final=True))
    await end_lease(store, "train/1")
    assert await store.epochs.open("train", 1, 99, 2) == TASKS - 2 * BATCH
    completed = await names(store, 1)
    assert completed[: len(begun)] == begun
    assert sorted(completed) == sorted(await names(store, 0))
    assert {len(task.slots) for task in await store.tasks.find("train") if task.epoch == 1} == {4}
    await store.database["Epoch"].delete_one({"_id": "train/1"})
    await store.database["Task"].delete_many({"epoch": 1})
    await store.epochs.open("train", 1, 7, 4)
    assert await names(store, 1) == completed
    assert await problems(store, is_final=True) == []


async def test_a_run_is_not_done_while_a_killed_load_is_not_completed(
    store: Store, run_config: RunConfig
) -> None:
    await die_in(f"store.tasks.load(make_tasks({TASKS}))", run_config)
    assert len(await names(store, 0)) == 2 * BATCH
    assert await store.epochs.next("train", 1) == 0
    assert await store.epochs.size("train") == TASKS
    await store.database["Task"].update_many({}, {"$set": {"status": "completed"}})
    settings = StreamSettings(
        groups_per_step=1, num_epochs=1, freshness=Freshness(max_staleness=1),
        wait_seconds=1.0,
    )  # fmt: skip
    assert not await DataStream(store, settings)._sampling_finished()
    await end_lease(store, "train/0")
    assert (await store.tasks.load(make_tasks(TASKS))).inserted == TASKS - 2 * BATCH
    assert await store.epochs.next("train", 1) is None
    assert await problems(store) == []


async def test_tasks_that_are_loaded_late_join_every_epoch(store: Store) -> None:
    await store.tasks.load(make_tasks(5))
    await store.epochs.open("train", 1, 0, 3)
    await store.tasks.load(make_tasks(8))
    assert await store.epochs.next("train", 2) == 1
    assert await problems(store) == []
    assert await store.epochs.open("train", 1, 0, 2) == 3
    assert await store.epochs.next("train", 2) is None
    assert {len(task.slots) for task in await store.tasks.find("train") if task.epoch == 1} == {3}
    assert await problems(store, is_final=True) == []


async def test_an_epoch_without_its_document_is_found(store: Store) -> None:
    await store.tasks.load(make_tasks(3))
    await store.epochs.open("train", 1, 0, 2)
    await store.database["Epoch"].delete_one({"_id": "train/1"})
    (problem,) = await problems(store)
    assert "Epoch train/1: its document: expected one, found none" in problem
    assert await store.epochs.next("train", 2) == 1
    assert await store.epochs.open("train", 1, 0, 5) == 0
    assert await problems(store) == []


async def test_a_check_finds_what_an_open_epoch_should_not_hold(store: Store) -> None:
    await store.tasks.load(make_tasks(3))
    await store.epochs.open("train", 1, 0, 2)
    tasks = store.database["Task"]
    stray = await tasks.find_one({"epoch": 1})
    assert stray is not None
    await tasks.insert_one({**stray, "_id": "train/1/stray", "task_id": "stray"})
    assert any("1 that differ: stray" in text for text in await problems(store))
    await tasks.delete_one({"_id": "train/1/stray"})
    await tasks.delete_one({"_id": "train/0/2"})
    assert any("Epoch train/0: tasks" in text for text in await problems(store))


async def test_an_opener_that_lost_its_lease_leaves_the_rest_to_the_next(
    store: Store, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.tasks.load(make_tasks(TASKS))
    async with await open_store(run_config) as other:
        copy_batch = store.epochs._copy_batch

        async def overtaken(*arguments: Any) -> None:
            await copy_batch(*arguments)
            monkeypatch.undo()
            await end_lease(store, "train/1")
            assert await other.epochs.open("train", 1, 0, 2) == TASKS - BATCH

        monkeypatch.setattr(store.epochs, "_copy_batch", overtaken)
        assert await store.epochs.open("train", 1, 0, 2) == 0
    opening = (await store.epochs._leases.by_split("train"))[1]
    assert (opening.status, opening.tasks, opening.owner) == (EpochStatus.OPEN, TASKS, None)
