"""Loading, epochs, waiting, services and lost servers, on a real server."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config.schema import RunConfig
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus, TaskStatus
from agentrl.documents.task import Slot, Task, task_key
from agentrl.documents.task_file import read_tasks
from agentrl.errors import StoreError, TaskFileError
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store.client import Store, open_store

pytestmark = pytest.mark.integration


def make_task(number: int) -> Task:
    return Task(
        id=task_key("train", 0, str(number)), task_id=str(number), split="train", epoch=0, order=number,
        query="?", slots=(Slot(traj_id=0),), meta={"$odd": "a.b"},
    )  # fmt: skip


async def test_loading_is_idempotent(store: Store) -> None:
    tasks = [make_task(number) for number in range(5)]
    assert (await store.tasks.load(tasks[:3])).inserted == 3
    claim = await store.claims.claim(split="train", owner="$a", lease_seconds=60)
    assert claim is not None
    again = await store.tasks.load(tasks)
    assert (again.inserted, again.existing) == (2, 3)
    counts = await store.tasks.counts("train")
    assert (counts[TaskStatus.CREATED], counts[TaskStatus.RUNNING]) == (4, 1)
    assert await store.tasks.unfinished("train") == 5


async def test_loading_a_file_again_reads_none_of_it_and_finds_what_was_edited(
    store: Store, tmp_path: Path
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f'{{"id": {n}, "query": "?", "level": {n}}}\n' for n in range(5)))
    tasks = read_tasks(file).tasks
    assert (await store.tasks.load(tasks)).inserted == 5
    again = read_tasks(file).tasks
    # A number that is equal, and another text, as a person edits them in the database.
    edited = {"meta.level": 3.0}
    await store.database["Task"].update_one({"_id": "train/0/3"}, {"$set": edited})
    assert (await store.tasks.load(again)).existing == 5
    await store.database["Task"].update_one({"_id": "train/0/3"}, {"$set": {"query": "!"}})
    with pytest.raises(TaskFileError, match="'!' → '\\?'"):
        await store.tasks.load(again)
    await store.database["Task"].update_one(
        {"_id": "train/0/3"}, {"$set": {"query": "?", **{"meta.level": 3}}}
    )
    file.write_text("")
    assert (await store.tasks.load(again)).existing == 5


async def test_an_epoch_is_opened_once_by_eight_racers(store: Store) -> None:
    await store.tasks.load([make_task(number) for number in range(30)])
    opened = await asyncio.gather(*(store.epochs.open("train", 1, 0, 4) for _ in range(8)))
    assert sum(opened) == 30
    assert await store.epochs.open("train", 1, 0, 4) == 0
    assert await store.tasks.epochs("train") == [0, 1]
    epoch = [task for task in await store.tasks.find("train") if task.epoch == 1]
    assert [task.order for task in epoch] == list(range(30))
    assert [task.task_id for task in epoch] != [str(number) for number in range(30)]
    assert {len(task.slots) for task in epoch} == {4}
    assert epoch[0].meta == {"$odd": "a.b"}


async def test_a_change_ends_the_wait_and_silence_lasts_until_the_timeout(store: Store) -> None:
    await store.wait_for_change("Task", timeout=5)
    waiter = asyncio.create_task(store.wait_for_change("Task", timeout=60))
    await asyncio.sleep(0)
    await store.tasks.load([make_task(0)])
    async with asyncio.timeout(20):
        await waiter
    async with asyncio.timeout(20):
        await store.wait_for_change("PolicyVersion", timeout=0.1)


async def test_services_live_by_their_heartbeat(store: Store) -> None:
    service = InferenceService(id="e", url="http://x", engine="local", model="m", host="h", pid=1)
    await store.services.register(service)
    await store.services.beat("e", status=ServiceStatus.READY, policy_version=3, running_requests=2)
    (live,) = await store.services.live(30)
    assert (live.policy_version, live.running_requests) == (3, 2)
    await store.services.beat("e", status=ServiceStatus.READY, policy_version=3, running_requests=0)
    for version in range(4, 24):
        await store.services.beat("e", status=ServiceStatus.READY, policy_version=version, running_requests=0)
    (live,) = await store.services.live(30)
    assert [served.version for served in live.served] == list(range(4, 24))
    assert live.served[0].at <= live.served[-1].at <= live.heartbeat
    assert await store.services.live(-1) == []
    await store.services.stop("e")
    assert await store.services.live(30) == []
    with pytest.raises(StoreError, match="not registered"):
        await store.services.beat("none", status=ServiceStatus.READY, policy_version=0, running_requests=0)


async def test_a_lost_server_is_an_error_in_time_and_its_data_come_back(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "mongo")
    status = mongo.up()
    try:
        run = RunConfig(run_name="lost", mongo_dir=str(mongo.directory), db_timeout_seconds=1.0)
        async with await open_store(run) as store:
            await store.tasks.load([make_task(0)])
            assert status.pid is not None
            os.kill(status.pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                with pytest.raises(StoreError, match=r"127\.0\.0\.1"):
                    await store.tasks.load([make_task(1)])
            again = await asyncio.to_thread(mongo.up)
            assert again.port == status.port
            assert again.pid != status.pid
            assert (await store.tasks.load([make_task(0), make_task(1)])).existing == 1
    finally:
        mongo.down()


def with_text(number: int, **fields: object) -> Task:
    return replace(make_task(number), **fields)  # type: ignore[arg-type]


async def test_a_changed_task_is_refused_field_by_field_and_nothing_is_written(store: Store) -> None:
    await store.tasks.load([make_task(number) for number in range(8)])
    changed = [with_text(number, query="new\x1b[31m", answer=number) for number in range(7)]
    two_slots = (Slot(traj_id=0), Slot(traj_id=1))
    with pytest.raises(TaskFileError) as caught:
        await store.tasks.load([*changed, with_text(7, slots=two_slots), make_task(8)])
    message = str(caught.value)
    assert message.startswith("8 tasks of the file are in the run already, with another text")
    assert r"train/0/0: query '?' → 'new\x1b[31m'; answer None → 0" in message
    assert "… and 3 more" in message
    assert "--update" in message
    assert (await store.tasks.counts("train"))[TaskStatus.CREATED] == 8
    with pytest.raises(TaskFileError, match=r"train/0/7: num_generations 1 → 2"):
        await store.tasks.load([with_text(7, slots=two_slots)])


async def test_an_update_changes_tasks_that_nobody_has_begun_in_every_epoch(store: Store) -> None:
    await store.tasks.load([make_task(number) for number in range(3)])
    handed_back = await store.claims.claim(split="train", owner="a", lease_seconds=60)
    assert handed_back is not None
    await store.attempts.release(handed_back)
    await store.database["Task"].update_one({"_id": handed_back.task.id}, {"$set": {"order": 9}})
    claim = await store.claims.claim(split="train", owner="a", lease_seconds=60)
    assert claim is not None
    await store.epochs.open("train", 1, 0, 2)
    done = await store.tasks.load([with_text(number, query="new") for number in range(4)], update=True)
    assert (done.inserted, done.existing, done.updated) == (1, 3, 2)
    assert done.left == (claim.task.id,)
    texts = {task.id: task.query for task in await store.tasks.find("train")}
    assert texts == {
        f"train/{epoch}/{number}": "?" if f"train/0/{number}" == claim.task.id else "new"
        for epoch, number in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2))
    }
    assert {len(task.slots) for task in await store.tasks.find("train") if task.epoch == 1} == {2}
    assert (await store.tasks.load([with_text(1, query="new")])).existing == 1


async def test_a_released_trajectory_of_a_task_that_is_changed_begins_anew(store: Store) -> None:
    await store.tasks.load([make_task(0)])
    for text, attempt in (("?", 1), ("new", 2)):
        claim = await store.claims.claim(split="train", owner="a", lease_seconds=60)
        assert claim is not None
        assert (claim.first_attempt, claim.task.query) == (attempt, text)
        assert (await store.records.create(claim)).query == text
        await store.attempts.release(claim)
        await store.tasks.load([with_text(0, query="new")], update=True)


async def test_two_that_load_different_files_at_once_do_not_both_succeed(store: Store) -> None:
    files = [[with_text(number, query=text) for number in range(2500)] for text in ("one", "two")]
    loads = await asyncio.gather(*(store.tasks.load(tasks) for tasks in files), return_exceptions=True)
    assert any(isinstance(result, TaskFileError) for result in loads)
