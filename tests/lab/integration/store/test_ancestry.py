"""A run and its child on a real server: who holds a document, and what the parent keeps for the child."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from child_run import forked_small_run
from db_command import violations
from small_run import ABANDONED, READY, RUNNING, STEP, TRAINED, UNTOUCHED, build

from agentrl.config.schema import RunConfig
from agentrl.documents.run import PARENT, Relative, child_key
from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.documents.task import record_key
from agentrl.errors import ConfigError, StoreError
from agentrl.lab.deletion import Retention
from agentrl.lab.fork import Begun, Fork
from agentrl.lab.manage_runs import RunAdmin, rename_run
from agentrl.lab.transfer import Transfer
from agentrl.store.client import Store, open_connection, open_existing, open_store
from agentrl.store.mechanics.connection import DATA, RECORD, RUN, TASK
from agentrl.store.mechanics.connection import STEP as STEPS

pytestmark = pytest.mark.integration
ALIVE = 10.0


@pytest.fixture
async def child(store: Store, run_config: RunConfig, tmp_path: Path) -> AsyncIterator[Store]:
    """A child of the small run after its only step; the parent knows it."""
    await build(store, tmp_path / "weights", unfinished=False)
    checkpoint = tmp_path / "output" / "checkpoint-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    begun = Relative(
        id=PARENT,
        run=store.run_name,
        kind="fork",
        step=1,
        checkpoint=str(checkpoint),
        changed={"loss": [1, 2]},
    )
    config = replace(run_config, run_name=f"{store.run_name}_child")
    async with await open_store(config) as opened:
        await opened.database[RUN].insert_one(begun.to_document())
        await store.ancestry.adopt(opened.run_name, begun)
        yield opened
        for name in (opened.run_name, f"{opened.run_name}2"):
            await opened.connection.client.drop_database(name)


async def test_a_child_reads_what_its_ancestors_hold(store: Store, child: Store) -> None:
    """A document is its nearest holder's; a Task that a child copied is its parent's."""
    assert [each.run for each in await child.ancestry.lineage()] == [store.run_name]
    assert [each.run for each in await store.ancestry.living_children()] == [child.run_name]
    record = record_key(TRAINED, 0, 1)
    assert await child.ancestry.holder(RECORD, record) == store.run_name
    data = await store.database[DATA].find_one({"trained_count": 1})
    held = await child.holding(DATA, data["_id"])
    assert held.run_name == store.run_name
    task = await store.database[TASK].find_one({"_id": TRAINED})
    assert task is not None
    await child.database[TASK].insert_one({**task, "inherited": True})
    assert await child.ancestry.holder(TASK, TRAINED) == store.run_name
    await child.database[TASK].update_one({"_id": TRAINED}, {"$set": {"inherited": False}})
    assert await child.ancestry.holder(TASK, TRAINED) == child.run_name
    assert await child.holding(RECORD, "nobody's") is None


async def test_the_parent_keeps_what_its_child_needs(store: Store, child: Store) -> None:
    """The trainer deletes no checkpoint from which a child began, and no child begins from a deleted one."""
    attempt = await store.trainer_lease.acquire("trainer", "host", 1, 60.0)
    names = ["checkpoint-000001", "checkpoint-000002"]
    assert await store.trainer_lease.discard_checkpoints(attempt, names) == ["checkpoint-000002"]
    late = replace((await store.ancestry.children())[0], checkpoint="/output/checkpoint-000002")
    with pytest.raises(ConfigError, match="is being deleted"):
        await store.ancestry.adopt("late", late)


async def test_prune_keeps_the_groups_that_a_child_trains_again(store: Store, child: Store) -> None:
    """Their data, calls and failures stay; without the child they go."""
    before = (await Retention(store.connection).prune(last_step=1, dry_run=True)).trajectories
    note = {"_id": child_key(child.run_name)}
    await store.database[RUN].update_one(note, {"$set": {"kind": "whatif", "steps": [1, 1]}})
    step = await store.database[STEPS].find_one({"_id": STEP})
    after = (await Retention(store.connection).prune(last_step=1, dry_run=True)).trajectories
    assert 0 < len(step["data"]) <= before - after
    await child.connection.client.drop_database(child.run_name)
    assert (await Retention(store.connection).prune(last_step=1, dry_run=True)).trajectories == before
    assert await store.ancestry.children() == []


async def test_a_parent_is_not_deleted_or_renamed(store: Store, child: Store, run_config: RunConfig) -> None:
    """The message names the child; deleting that lets the parent go."""
    with pytest.raises(StoreError, match=f"parent of {child.run_name}") as caught:
        await RunAdmin(store.connection).delete(None, ALIVE)
    assert f"agentrl runs rm {child.run_name}" in str(caught.value)
    with pytest.raises(StoreError, match="cannot be renamed"):
        await rename_run(run_config, f"{store.run_name}_new", ALIVE)
    await RunAdmin(child.connection).delete(None, ALIVE)
    assert await store.ancestry.children() == []
    await store.ancestry.require_childless("deleted")


async def test_the_note_follows_a_child_that_is_renamed_exported_or_lost(
    store: Store, child: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    """The parent knows the child's present name, and ``db check`` finds what does not fit."""
    config = replace(run_config, run_name=child.run_name)
    renamed = replace(run_config, run_name=f"{child.run_name}2")
    await rename_run(config, renamed.run_name, ALIVE)
    assert [each.run for each in await store.ancestry.children()] == [renamed.run_name]
    async with await open_existing(renamed) as moved:
        assert await violations(moved) == []
        await Transfer(moved.connection).export(tmp_path / "exported")
        await RunAdmin(moved.connection).delete(None, ALIVE)
    vacant = await open_connection(config)
    try:
        await Transfer(vacant).load(tmp_path / "exported")
    finally:
        await vacant.close()
    async with await open_store(config) as imported:
        assert [each.run for each in await store.ancestry.children()] == [config.run_name]
        await store.ancestry.release(config.run_name)
        (found,) = await violations(imported)
    assert "Run parent" in found
    assert child_key(config.run_name) in found


async def test_a_child_has_the_tasks_that_its_parent_has_not_trained(store: Store, tmp_path: Path) -> None:
    """They are as new, in order; trained ones are the parent's; every invariant holds in both runs."""
    async with forked_small_run(store, tmp_path) as (child, begun):
        assert begun == Begun(version=1, inherited=1, waiting=4)
        assert (
            await Fork(store.connection).checkpoint(tmp_path / "output", 1)
        ).folder.name == "checkpoint-000001"
        tasks = {task.id: task for task in await child.tasks.find("train")}
        assert [*tasks] == [TRAINED, READY, ABANDONED, RUNNING, UNTOUCHED]
        assert tasks[TRAINED].inherited
        parents = {task.id: task for task in await store.tasks.find("train")}
        assert tasks[TRAINED].slots == parents[TRAINED].slots
        for key in (READY, ABANDONED, RUNNING, UNTOUCHED):
            task, own = tasks[key], parents[key]
            assert (task.status, task.order, task.query) == (TaskStatus.CREATED, own.order, own.query)
            assert [(slot.status, slot.attempt) for slot in task.slots] == [(SlotStatus.OPEN, 0)] * 2
            assert task.group is None
        assert [(step.id, step.inherited) for step in await child.steps.find()] == [(STEP, True)]
        assert await child.ancestry.holder("Record", f"{TRAINED}/1/1") == store.run_name
        assert await violations(child) == []
        assert await violations(store) == []
