"""``agentrl db reopen``: failed slots open again by kind of failure, finalized groups while untrained."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_run as run
from db_command import Db, violations
from ready_data import ready_data, statuses

from agentrl.config.schema import GroupConfig
from agentrl.documents.record import Failure
from agentrl.documents.status import DataStatus, RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import Task, task_key
from agentrl.documents.training import TrainStep
from agentrl.errors import FailureError
from agentrl.lab.db_cli import KINDS
from agentrl.lab.regroup import Blocker, Reopening
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

GROUP = task_key("train", 0, "group")


async def group_of(
    store: Store, *kinds: str, scores: tuple[float, ...] = (0.0, 1.0), key: str = GROUP
) -> None:
    """A group with a slot that failed for good for each of ``kinds``, and scored ones."""
    await run.add_task(store, GROUP, 0, generations=len(kinds) + len(scores))
    for kind in kinds:
        failure = Failure(kind=kind, message="m")
        await store.attempts.fail(await run.claim(store), failure, max_attempts=1, backoff_seconds=0.0)
    for score in scores:
        await run.score(store, await run.claim(store), score)


async def finalize(store: Store) -> int:
    return await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()


async def task_of(store: Store, key: str = GROUP) -> Task:
    task = await store.tasks.get(key)
    assert task is not None
    return task


@pytest.mark.parametrize("kind", ["tool", "harness", "poison"])
async def test_only_slots_of_that_failure_open_with_all_their_attempts(
    store: Store, tmp_path: Path, db: Db, kind: str
) -> None:
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    await group_of(store, kind, "engine")
    assert "would be reopened: 1 slots of 1 groups, 0 of" in await db(
        "reopen", "--failure-kind", kind, "--dry_run"
    )
    assert (await task_of(store)).status is TaskStatus.WAITING
    assert "reopened: 1 slots of 1 groups, 0 of which had been finalized" in await db(
        "reopen", "--failure_kind", kind
    )
    task = await task_of(store)
    assert [slot.status for slot in task.slots[:2]] == [SlotStatus.OPEN, SlotStatus.FAILED]
    assert (task.status, task.slots[0].attempt, task.slots[0].released) == (TaskStatus.RUNNING, 1, 1)
    claim = await run.claim(store)
    assert (claim.traj_id, claim.attempt) == (0, 2)
    status = await store.attempts.fail(
        claim, Failure(kind="tool", message="m"), max_attempts=2, backoff_seconds=0.0
    )
    assert status is SlotStatus.OPEN
    await run.score(store, await run.claim(store), 1.0)
    assert await finalize(store) == 1
    assert await violations(store) == []


async def test_a_finalized_untrained_group_is_undecided_and_decided_anew(
    store: Store, tmp_path: Path, db: Db
) -> None:
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    await group_of(store, "tool", scores=(0.0, 1.0, 1.0))
    assert await finalize(store) == 1
    out = await db("reopen", "--failure_kind", "tool", "--split", "train")
    assert "1 slots of 1 groups, 1 of which had been finalized" in out
    assert "3 training documents of these groups are deleted" in out
    task = await task_of(store)
    assert (task.status, task.group) == (TaskStatus.RUNNING, None)
    records = await store.records.by_task(GROUP)
    assert [record.status for record in records] == [RecordStatus.FAILED] + [RecordStatus.SCORED] * 3
    assert {record.advantage for record in records} == {None}
    assert await store.groups.count_open("train") == 1
    assert await violations(store) == []
    await run.score(store, await run.claim(store), 0.0)
    assert await finalize(store) == 1
    assert (await statuses(store))[DataStatus.READY] == 4
    assert await violations(store) == []


async def test_a_trained_group_and_a_planned_one_stay(store: Store, tmp_path: Path) -> None:
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    await group_of(store, "tool")
    assert await finalize(store) == 1
    data = tuple(meta.id for meta in await ready_data(store, "train"))
    await store.steps.plan(TrainStep(id="1/1", step=1, policy_version=0, data=data, owner="t"))
    reopening = Reopening(store.connection)
    assert (await reopening.reopen(["tool"])).left == {Blocker.TRAINED: 1}
    await store.steps.commit("1/1", {}, data)
    done = await reopening.reopen()
    assert (done.slots, done.left) == (0, {Blocker.TRAINED: 1})
    assert (await task_of(store)).status is TaskStatus.COMPLETED
    assert await violations(store) == []


async def test_a_group_whose_calls_were_pruned_stays(store: Store, tmp_path: Path, db: Db) -> None:
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    await group_of(store, "tool", scores=(1.0, 1.0))
    assert await finalize(store) == 1
    await db("prune", "--older_than_days", "0")
    assert "left as they are: 1 groups (pruned)" in await db("reopen")
    assert "reopened: 0 slots" in await db("reopen", "--failure_kind", "scorer")


def test_every_kind_of_failure_can_be_named() -> None:
    kinds, errors = {"timeout", "poison"}, [FailureError]
    while errors:
        error = errors.pop()
        errors += error.__subclasses__()
        kinds.add(error.kind)
    assert kinds <= set(KINDS)
