"""What the database of a new child holds, for a run that samplers and a trainer made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from db_command import violations
from small_run import ABANDONED, READY, RUNNING, STEP, TRAINED, UNTOUCHED, build

from agentrl.documents.family import PARENT, Relative
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.store.admin.fork import Begun, Fork
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def test_a_child_has_the_tasks_that_its_parent_has_not_trained(store: Store, tmp_path: Path) -> None:
    """They are as new, in order; trained ones are the parent's; every invariant holds in both runs."""
    await build(store, tmp_path / "weights")
    checkpoint = tmp_path / "output" / "checkpoint-000001"
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": 1, "train_steps": [STEP]}))
    work = Fork(store.connection)
    assert (await work.checkpoint(checkpoint.parent, 1)).name == checkpoint.name
    begun = Relative(id=PARENT, run=store.run_name, kind="fork", step=1, checkpoint=str(checkpoint))
    model = PolicyVersion(id=0, step=0, location=str(checkpoint / "model"), files=(), train_step=None)
    name = f"{store.run_name}_child"
    try:
        assert await work.begin(name, begun, model) == Begun(version=1, inherited=1, waiting=4)
        child = store.beside(name)
        tasks = {task.id: task for task in await child.tasks.find("train")}
        assert [*tasks] == [TRAINED, READY, ABANDONED, RUNNING, UNTOUCHED]
        assert tasks[TRAINED].inherited
        parents = {task.id: task for task in await store.tasks.find("train")}
        assert tasks[TRAINED].slots == parents[TRAINED].slots
        for key in (READY, ABANDONED, RUNNING, UNTOUCHED):
            task = tasks[key]
            assert (task.status, task.order, task.query) == (
                TaskStatus.CREATED, parents[key].order, parents[key].query,
            )  # fmt: skip
            assert [(slot.status, slot.attempt) for slot in task.slots] == [(SlotStatus.OPEN, 0)] * 2
            assert task.group is None
        assert [(step.id, step.inherited) for step in await child.steps.find()] == [(STEP, True)]
        assert await child.ancestry.holder("Record", f"{TRAINED}/1/1") == store.run_name
        assert await violations(child) == []
        assert await violations(store) == []
    finally:
        await store.connection.client.drop_database(name)
