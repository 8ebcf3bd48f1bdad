"""Steps of many parts on a real server: killed between any two, they are finished by the next trainer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pymongo.monitoring
import pytest
import small_run as run
from db_command import violations
from ready_data import ready_data, statuses
from training_data import group

from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.documents.document import now
from agentrl.documents.record import Record
from agentrl.documents.status import DataStatus, RecordStatus, StepStatus
from agentrl.documents.task import task_key
from agentrl.documents.training import TrainStep
from agentrl.errors import LeaseLostError, StoreError
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store import steps
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics.connection import Connection
from agentrl.store.steps import StaleVersions

pytestmark = pytest.mark.integration

GROUPS = tuple(task_key("train", 0, name) for name in "abcde")
MANY = 400
"""Data of a step, many times those of a part."""


class Updated(pymongo.monitoring.CommandListener):
    """Keeps how many documents the largest update has changed."""

    def __init__(self) -> None:
        self.largest = 0

    def started(self, event: pymongo.monitoring.CommandStartedEvent) -> None:
        """Nothing is kept of requests."""

    def succeeded(self, event: pymongo.monitoring.CommandSucceededEvent) -> None:
        """Keep the number."""
        if event.command_name == "update":
            self.largest = max(self.largest, int(event.reply["n"]))

    def failed(self, event: pymongo.monitoring.CommandFailedEvent) -> None:
        """Nothing is kept of errors."""


UPDATED = Updated()
pymongo.monitoring.register(UPDATED)


class Killed(BaseException):
    """The trainer's process has ended here."""


class KillAfter:
    """Ends the trainer in front of its transaction number ``left`` + 1, counted while ``armed``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        whole = Connection.transaction

        async def transaction(
            connection: Connection, callback: Callable[[Any], Coroutine[Any, Any, Any]]
        ) -> Any:
            if self.left is not None:
                if self.left == 0:
                    raise Killed
                self.left -= 1
            return await whole(connection, callback)

        patch.setattr(Connection, "transaction", transaction)

    async def run(self, left: int, action: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Whether ``action`` ends before it is killed, behind ``left`` of its transactions."""
        self.left = left
        try:
            await action()
        except Killed:
            return False
        finally:
            self.left = None
        return True


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> KillAfter:
    monkeypatch.setattr(steps, "CHUNK", 3)
    return KillAfter(monkeypatch)


@pytest.fixture
async def data(store: Store, tmp_path: Path) -> list[str]:
    """Five groups of two trajectories, finalized: four parts."""
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    for order, key in enumerate(GROUPS):
        await run.add_task(store, key, order)
        for value in (0.0, 1.0):
            await run.score(store, await run.claim(store), value)
    await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()
    return sorted(meta.id for meta in await ready_data(store, "train"))


async def require_no_violation(store: Store) -> None:
    assert await violations(store, max_trained_count=2) == []


async def begin_anew(store: Store) -> int:
    """What a trainer that starts without a checkpoint does."""
    attempt = await store.trainer_lease.acquire("me", "host", 1, 60)
    await store.steps.revert_after(0, attempt=attempt)
    return attempt


async def train(store: Store, attempt: int, number: int, data: list[str]) -> None:
    step = TrainStep(
        id=f"{attempt}/{number}", step=number, policy_version=0, data=tuple(data), owner="trainer"
    )
    await store.steps.plan(step, attempt=attempt)
    await store.steps.commit(
        step.id, {"loss": 0.5}, data, max_trained_count=2, attempt=attempt, counted=GROUPS
    )


async def require_untouched(store: Store, data: list[str]) -> None:
    items = await store.training.fetch(data)
    assert {(item.status, item.trained_at_steps, item.planned_step) for item in items} == {
        (DataStatus.READY, (), None)
    }
    assert len(await store.groups.uncounted("train")) == len(GROUPS)
    await require_no_violation(store)


async def test_a_trainer_killed_between_any_two_parts_leaves_what_the_next_one_finishes(
    store: Store, data: list[str], kill: KillAfter
) -> None:
    """First it dies in planning and committing, then the next one in undoing, then a third one finishes."""
    transactions, states = 0, set()
    while True:
        attempt = await begin_anew(store)
        ended = await kill.run(transactions, partial(train, store, attempt, 1, data))
        states |= {step.status for step in await store.steps.find(status=None)}
        await require_no_violation(store)
        if ended:
            break
        await kill.run(transactions % 4 + 1, partial(begin_anew, store))
        states |= {step.status for step in await store.steps.find(status=None)}
        await require_no_violation(store)
        await begin_anew(store)
        await require_untouched(store, data)
        transactions += 1
    assert transactions == 8
    assert states == set(StepStatus)
    items = await store.training.fetch(data)
    assert {(item.status, item.trained_at_steps) for item in items} == {(DataStatus.READY, (1,))}
    assert await store.groups.uncounted("train") == []


async def test_an_undo_that_is_killed_between_any_two_parts_is_finished(
    store: Store, data: list[str], kill: KillAfter
) -> None:
    """Two steps train the same data; the second is undone, and then both."""
    transactions, after = 0, 1
    while True:
        attempt = await begin_anew(store)
        await train(store, attempt, 1, data)
        await train(store, attempt, 2, data)
        undo = partial(store.steps.revert_after, after, attempt=attempt)
        ended = await kill.run(transactions, undo)
        await require_no_violation(store)
        await undo()
        items = await store.training.fetch(data)
        kept = tuple(range(1, after + 1))
        assert {(item.status, item.trained_at_steps) for item in items} == {(DataStatus.READY, kept)}
        await require_no_violation(store)
        if ended and after == 0:
            break
        transactions, after = (0, 0) if ended else (transactions + 1, after)


async def test_a_commit_that_is_repeated_goes_on_where_it_was(
    store: Store, data: list[str], kill: KillAfter
) -> None:
    attempt = await begin_anew(store)
    step = TrainStep(id="1/1", step=1, policy_version=0, data=tuple(data), owner="trainer")
    await store.steps.plan(step, attempt=attempt)

    async def commit() -> None:
        await store.steps.commit("1/1", {"loss": 0.5}, data[1:], attempt=attempt, counted=GROUPS)

    assert not await kill.run(2, commit)
    last = await store.steps.last()
    assert (last.status, last.metrics) == (StepStatus.COMMITTING, {"loss": 0.5})
    assert [member.id for member in await store.training.ready_members("train", step=2)] == data[:1]
    await commit()
    await commit()
    items = await store.training.fetch(data)
    assert [item.trained_at_steps for item in items] == [(), *[(1,)] * 9]
    records = [await store.records.get(key) for key in data]
    assert [(record.trained_count, record.last_trained_step) for record in records if record] == [
        (0, None), *[(1, 1)] * 9,
    ]  # fmt: skip


async def test_a_plan_that_cannot_be_whole_marks_nothing(
    store: Store, data: list[str], kill: KillAfter
) -> None:
    attempt = await begin_anew(store)
    await store.database["DBRecordData"].update_one({"_id": data[-1]}, {"$set": {"status": "stale"}})
    with pytest.raises(StoreError, match="only 0 of them are ready"):
        await train(store, attempt, 1, data)
    items = await store.training.fetch(data[:-1])
    assert {(item.status, item.planned_step) for item in items} == {(DataStatus.READY, None)}
    assert {step.status for step in await store.steps.find(status=None)} == {StepStatus.REVERTED}


async def test_a_trainer_that_is_replaced_between_two_parts_writes_no_more(
    store: Store, data: list[str], kill: KillAfter
) -> None:
    old = await begin_anew(store)
    assert not await kill.run(6, partial(train, store, old, 1, data))
    await begin_anew(store)
    with pytest.raises(LeaseLostError):
        await store.steps.commit(f"{old}/1", {}, data, attempt=old)
    await require_untouched(store, data)


async def test_data_that_went_stale_are_ready_again_when_what_trained_them_is_undone(
    store: Store, data: list[str]
) -> None:
    attempt = await begin_anew(store)
    await train(store, attempt, 1, data)
    assert await store.training.mark_stale("train", StaleVersions(((0, 0),))) == len(data)
    await store.steps.revert_after(0, attempt=attempt)
    await require_untouched(store, data)


async def test_no_transaction_grows_with_the_step(run_config: RunConfig) -> None:
    items = [item for number in range(MANY // 8) for item in group(f"g{number:05}", size=8)]
    ids = [item.id for item in items]
    moment = now() - timedelta(hours=1)
    records = [
        Record(
            id=item.id, task=item.task, traj_id=0, attempt=1, split="train", epoch=0, query="?",
            owner="s", status=RecordStatus.READY, created_at=moment,
        ).to_document()
        for item in items
    ]  # fmt: skip
    async with await open_store(run_config) as store:
        await store.database["DBRecordData"].insert_many([item.to_document() for item in items])
        await store.database["Record"].insert_many(records)
        attempt = await begin_anew(store)
        UPDATED.largest = 0
        await train(store, attempt, 1, ids)
        counted = {"trained_count": 1, "last_trained_step": 1}
        assert await store.database["Record"].count_documents(counted) == MANY
        assert await store.steps.revert_after(0, attempt=attempt) == 1
        assert (await statuses(store))[DataStatus.READY] == MANY
        assert await store.database["Record"].count_documents({"trained_count": 0}) == MANY
        assert UPDATED.largest == steps.CHUNK
        await store.database.client.drop_database(run_config.run_name)
