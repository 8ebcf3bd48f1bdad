"""Who finalizes a group: the sampler that completed it, at once; any other only what was left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pymongo.monitoring
import pytest
from test_sampling import Setting, right_then_wrong, task

from agentrl.columns import pool as pool_module
from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.data.finalize_group import group_problem
from agentrl.documents.record import Failure
from agentrl.documents.status import RecordStatus, TaskStatus
from agentrl.rollout import housekeeping
from agentrl.store import claims
from agentrl.store.client import Store, open_store

pytestmark = pytest.mark.integration

SAMPLERS = 4
GROUPS = 12


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_POLL_SECONDS", 0.05)
    monkeypatch.setattr(housekeeping, "HOUSEKEEPING_SECONDS", 0.1)


class Reads(pymongo.monitoring.CommandListener):
    """Keeps the groups whose Records are read in order to finalize them."""

    def __init__(self) -> None:
        self.groups: list[str] = []

    def started(self, event: pymongo.monitoring.CommandStartedEvent) -> None:
        """Keep the group."""
        query: dict[str, Any] = event.command.get("filter", {})
        if event.command_name == "find" and event.command["find"] == "Record" and "task" in query:
            self.groups.append(query["task"])

    def succeeded(self, event: pymongo.monitoring.CommandSucceededEvent) -> None:
        """Nothing is kept of answers."""

    def failed(self, event: pymongo.monitoring.CommandFailedEvent) -> None:
        """Nothing is kept of answers."""


READS = Reads()
pymongo.monitoring.register(READS)


@pytest.fixture
async def stores(run_config: RunConfig) -> AsyncIterator[list[Store]]:
    """A store for each sampler, on one run."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(await open_store(run_config)) for _ in range(SAMPLERS)]
        yield opened
        await opened[0].database.client.drop_database(run_config.run_name)


async def test_a_group_is_read_once_to_finalize_it_however_many_samplers_there_are(
    stores: list[Store],
) -> None:
    await stores[0].tasks.load([task(f"t{number}") for number in range(GROUPS)])
    READS.groups = []
    settings = [Setting(store, "<answer>3</answer>") for store in stores]
    await asyncio.gather(*(setting.run() for setting in settings))
    assert (await stores[0].tasks.counts("train"))[TaskStatus.COMPLETED] == GROUPS
    assert sorted(READS.groups) == sorted(f"train/0/t{number}" for number in range(GROUPS))


async def test_the_calls_that_answer_the_same_are_compared(store: Store) -> None:
    await store.tasks.load([task("a")])
    config = GroupConfig(step_advantage="gigpo", advantage="dr_grpo", turn_discount=0.5)
    await Setting(store, right_then_wrong(), groups=config).run()
    group = await store.groups.stored("train/0/a")
    assert group is not None
    assert group.task.group is not None
    assert group.task.group["shared_steps"] == 1.0
    right, wrong = sorted(group.records, key=lambda record: -(record.score or 0))
    # The question and the tool's result are the same for both: the returns are 0.5 and 1, and 0.
    assert (right.advantage, right.turn_advantages) == (0.5, (0.25, 0.5))
    assert (wrong.advantage, wrong.turn_advantages) == (-0.5, (-0.25, -0.5))
    data, _ = await store.training.fetch_readable([right.id, wrong.id])
    assert len(data) == 2
    assert group_problem(group, list(data.values())) is None


async def test_a_group_of_one_is_compared_with_the_window(store: Store) -> None:
    await store.tasks.load([task(f"t{number}", slots=1) for number in range(4)])
    config = GroupConfig(advantage="reward", baseline="window", min_score_spread=0.0)
    await Setting(store, right_then_wrong(), groups=config).run()
    for number in range(4):
        group = await store.groups.stored(f"train/0/t{number}")
        assert group is not None
        assert group.task.group is not None
        (record,) = group.records
        mean = group.task.group["rules"]["baseline_mean"]
        assert 0 <= mean <= 1
        if record.advantage is not None:
            assert record.advantage == pytest.approx((record.score or 0) - mean)
    assert await store.groups.mean_score("train", 0) == pytest.approx(0.5)
    assert await store.groups.mean_score("train", 99) is None


async def test_a_failure_that_completes_a_group_finalizes_it_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "SWEEP_SECONDS", 3600.0)
    await store.tasks.load([task("a")])
    setting = Setting(store, "<answer>3</answer>")
    claim = await store.claims.claim(split="train", owner="dead", lease_seconds=60)
    assert claim is not None
    await store.records.create(claim)
    failure = Failure(kind="engine", message="gone")
    await store.attempts.fail(claim, failure, max_attempts=1, backoff_seconds=1)
    await setting.run()
    finished = await store.tasks.get("train/0/a")
    assert finished is not None
    assert finished.group is not None
    assert (finished.group["scored"], finished.group["failed"]) == (1, 1)


@pytest.mark.parametrize("ending", ["scored", "reaped"])
async def test_what_a_killed_sampler_completed_is_finalized_by_another(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    killed, other = stores[:2]
    await killed.tasks.load([task("a", slots=1)])
    claim = await killed.claims.claim(split="train", owner="killed", lease_seconds=60)
    assert claim is not None
    await killed.records.create(claim)
    if ending == "scored":
        for status in (RecordStatus.RUNNING, RecordStatus.COMPLETED, RecordStatus.SCORING):
            await killed.records.advance(claim, status)
        assert await killed.attempts.score(claim, 1.0) is TaskStatus.WAITING
    else:
        monkeypatch.setattr(claims, "POISON_DEATHS", 1)
        await killed.claims.heartbeat([claim], 0.0)
        assert await killed.expired_leases.reap("train") == 1
    assert await other.groups.waiting("train") == ["train/0/a"]
    assert await other.groups.waiting("train", waiting_seconds=600.0) == []
    monkeypatch.setattr(housekeeping, "SWEEP_SECONDS", 0.2)
    await Setting(other, "<answer>3</answer>").run()
    finished = await other.tasks.get("train/0/a")
    assert finished is not None
    assert finished.status is TaskStatus.COMPLETED
