"""What the database of a new child holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from child_run import forked_small_run
from db_command import violations
from small_run import ABANDONED, READY, RUNNING, STEP, TRAINED, UNTOUCHED

from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.lab.manage_runs import Begun, Fork
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


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
