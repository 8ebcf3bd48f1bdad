"""A group that cannot be finalized: the others go on, it is given up with a reason and can be tried again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import small_run as run
from db_command import agentrl_db, violations
from ready_data import ready_data

from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.data import finalize_group
from agentrl.data.finalize_group import GroupRules, verifier
from agentrl.documents.document import now
from agentrl.documents.status import RecordStatus, TaskStatus
from agentrl.documents.task import Task, task_key
from agentrl.rollout import housekeeping as finalize_module
from agentrl.rollout.housekeeping import ATTEMPTS, GroupFinalizer
from agentrl.scoring.groups import ScoredGroup, group_filter
from agentrl.screens.run_screens import render_tables
from agentrl.screens.snapshot import SnapshotReader
from agentrl.screens.views.counts import Details
from agentrl.store.client import Store
from agentrl.store.groups import GroupOutcome, StoredGroup
from agentrl.store.mechanics import blobs

pytestmark = pytest.mark.integration

BAD = task_key("train", 0, "0-bad")
GOOD = [task_key("train", 0, f"{number}-good") for number in range(1, 4)]


@pytest.fixture(autouse=True)
async def begun(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published version; attempts follow one another at once."""
    monkeypatch.setattr(finalize_module, "RETRY_SECONDS", 0.0)
    await run.publish(store, tmp_path, 0, step=0, train_step=None)


async def group(store: Store, key: str, order: int) -> None:
    await run.add_task(store, key, order, generations=2)
    for score in (0.0, 1.0):
        await run.score(store, await run.claim(store), score)


async def task_of(store: Store, key: str) -> Task:
    task = await store.tasks.get(key)
    assert task is not None
    return task


class Rules:
    """The usual rules, but one group makes them raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.breaks = True
        self._decide = GroupRules.decide
        monkeypatch.setattr(GroupRules, "decide", lambda *args: self.decide(*args))

    def decide(self, rules: GroupRules, group: StoredGroup) -> GroupOutcome:
        if self.breaks and group.task.id == BAD:
            raise ZeroDivisionError("a rule \udcff mongodb://user:secret@host " + "long " * 2_000)
        return self._decide(rules, group)


async def test_the_others_go_on_and_the_bad_one_is_given_up_and_taken_up_again(
    store: Store, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = Rules(monkeypatch)
    for order, key in enumerate([BAD, *GOOD]):
        await group(store, key, order)
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    assert sum([await finalizer.run_waiting() for _ in range(ATTEMPTS)]) == 3
    bad = await task_of(store, BAD)
    assert bad.status is TaskStatus.COMPLETED
    assert (bad.group["outcome"], bad.group["scored"], bad.group["trained"]) == ("failed", 2, 0)
    assert bad.group["problem"].startswith("ZeroDivisionError: a rule ? mongodb://***@host long")
    assert "more characters]" in bad.group["problem"]
    records = await store.records.by_task(BAD)
    assert {record.status for record in records} == {RecordStatus.ABANDONED}
    assert all("could not be finalized: ZeroDivisionError" in str(item.abandoned_because) for item in records)
    assert await violations(store) == []
    from rich.console import Console

    console = Console(width=200)
    reader = SnapshotReader(store)
    console.print(render_tables(await reader.read(), await Details(store.connection).read()))
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert await agentrl_db(run_config, "reopen", "--failure_kind", "group") == 0
    assert "1 groups that could not be finalized" in capsys.readouterr().out
    assert (await task_of(store, BAD)).status is TaskStatus.WAITING
    assert await violations(store) == []
    rules.breaks = False
    assert await finalizer.run_waiting() == 1
    summary = (await task_of(store, BAD)).group
    assert summary["outcome"] == "trained"
    assert await violations(store) == []


async def test_attempts_are_counted_and_wait_longer_each_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rules(monkeypatch)
    monkeypatch.setattr(finalize_module, "RETRY_SECONDS", 1000.0)
    await group(store, BAD, 0)
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    waits = []
    for attempt in range(1, ATTEMPTS):
        assert await finalizer.run_waiting() == 0
        counted = (await task_of(store, BAD)).finalizing
        assert counted["attempts"] == attempt
        waits.append((counted["retry_at"] - now()).total_seconds())
        assert await store.groups.waiting("train") == []
        assert await violations(store) == []
        await store.database["Task"].update_one({"_id": BAD}, {"$set": {"finalizing.retry_at": None}})
    assert [round(wait / 1000) for wait in waits] == [1, 2, 4]
    assert await finalizer.run_waiting() == 0
    assert (await task_of(store, BAD)).status is TaskStatus.COMPLETED


@pytest.mark.parametrize("kept", ["first chunks", "every chunk", "other bytes"])
async def test_an_upload_that_was_cut_is_completed(
    store: Store, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """The chunks are there, the entry that makes them a file is not: the server was away between the two."""
    monkeypatch.setattr(blobs, "_LIMIT", 10)
    monkeypatch.setattr(blobs, "_CHUNK", 16)
    await group(store, BAD, 0)
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    assert await finalizer.run_waiting() == 1
    [one, two] = await store.training.fetch([meta.id for meta in await ready_data(store, "train")])
    files, chunks = (store.database[f"DBRecordData.packed.{name}"] for name in ("files", "chunks"))
    await store.database["DBRecordData"].delete_many({})
    await store.database["Record"].update_many(
        {"task": BAD}, {"$set": {"status": "scored", "advantage": None, "abandoned_because": None}}
    )
    await store.database["Task"].update_one({"_id": BAD}, {"$set": {"status": "waiting", "group": None}})
    await files.delete_many({})
    if kept == "first chunks":
        await chunks.delete_many({"n": {"$gt": 0}})
    if kept == "other bytes":
        async for chunk in chunks.find({}):
            await chunks.delete_one({"_id": chunk["_id"]})
            name = chunk["files_id"].rpartition("/")[0]
            await chunks.insert_one({"files_id": name, "n": chunk["n"], "data": b"?"})
    assert await finalizer.run_waiting() == 1
    again = await store.training.fetch([one.id, two.id])
    assert [item.input_ids for item in again] == [one.input_ids, two.input_ids]
    assert await violations(store) == []


@group_filter("refuses")
def refuses(group: ScoredGroup) -> list[str]:
    """Raises for one group, and keeps the second trajectory of the others."""
    if group.task == BAD:
        raise SystemExit("no licence")
    return [group.trajectories[1].id]


async def test_a_filter_that_raises_fails_its_group_alone(store: Store) -> None:
    for order, key in enumerate([BAD, GOOD[0]]):
        await group(store, key, order)
    rules = GroupConfig(group_filter="refuses", advantage="reward", min_score_spread=0.0)
    finalizer = GroupFinalizer(store, rules, split="train", seed=0)
    assert sum([await finalizer.run_waiting() for _ in range(ATTEMPTS)]) == 1
    bad, good = await task_of(store, BAD), await task_of(store, GOOD[0])
    assert (bad.group["outcome"], bad.group["rules"]["group_filter"]) == ("failed", "refuses")
    assert bad.group["problem"] == "group filter refuses raised SystemExit: no licence"
    first, second = await store.records.by_task(GOOD[0])
    assert good.group["filtered"] == [{"record": first.id, "because": "group filter refuses: not kept"}]
    assert (first.status, first.abandoned_because) == (
        RecordStatus.ABANDONED, "group filter refuses: not kept",
    )  # fmt: skip
    assert (second.status, second.advantage) == (RecordStatus.READY, 1.0)
    assert await violations(store) == []
    ready = await store.training.fetch([second.id])
    assert await verifier(store)(ready) == {}


async def test_a_filter_that_hangs_fails_its_group_and_the_sampler_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalize_group, "DECIDE_SECONDS", 0.2)
    released = threading.Event()

    @group_filter("hangs")
    def hangs(view: ScoredGroup) -> list[str]:
        if view.task == BAD:
            assert released.wait(60)
        return [item.id for item in view.trajectories]

    for order, key in enumerate([BAD, GOOD[0]]):
        await group(store, key, order)
    finalizer = GroupFinalizer(store, GroupConfig(group_filter="hangs"), split="train", seed=0)
    try:
        assert sum([await finalizer.run_waiting() for _ in range(ATTEMPTS)]) == 1
    finally:
        released.set()
    bad = await task_of(store, BAD)
    assert "took longer than 0.2 s" in bad.group["problem"]
