"""Long tails: a trajectory that outlasts its steps is cut or carried on; its group does not wait."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_run as run
from rollout_fakes import ScriptedEngine, format_of
from test_sampling import Setting, task

from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import Claim
from agentrl.inference.engine import Generation
from agentrl.rollout import housekeeping
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


class SlowLast(ScriptedEngine):
    """Answers two calls at once and the third when ``released`` is set."""

    def __init__(self) -> None:
        super().__init__(format_of(), "<answer>3</answer>", "<answer>4</answer>", "<answer>3</answer>")
        self.released = asyncio.Event()
        self.waiting = asyncio.Event()

    async def generate(self, *args: Any, **named: Any) -> Generation:
        if len(self.prompts) >= 2:
            self.waiting.set()
            await self.released.wait()
        return await super().generate(*args, **named)


@pytest.mark.parametrize("policy", ["cut", "carry"])
async def test_the_last_trajectory_of_a_group_is_cut_or_carried_after_its_step(
    store: Store, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(housekeeping, "WATCH_SECONDS", 0.05)
    steps = [SimpleNamespace(step=4)]

    async def last_step() -> SimpleNamespace:
        return steps[-1]

    monkeypatch.setattr(store.steps, "last", last_step)
    await store.tasks.load([task("a", slots=3)])
    engine = SlowLast()
    cut_after = 2 if policy == "cut" else None
    setting = Setting(store, router=engine, agent_name="single_turn", cut_after=cut_after)
    running = asyncio.create_task(setting.run())
    async with asyncio.timeout(60):
        await engine.waiting.wait()
        await scored(store, 2)
        steps.append(SimpleNamespace(step=5))
        await asyncio.sleep(0.3)
        assert not running.done(), "a step within the bound cuts nothing"
        steps.append(SimpleNamespace(step=6))
        if policy == "carry":
            await asyncio.sleep(0.3)
            engine.released.set()
        await running
    group = await store.tasks.get("train/0/a")
    assert group is not None
    assert group.status is TaskStatus.COMPLETED
    states = sorted(slot.status for slot in group.slots)
    records = await store.records.by_task("train/0/a")
    if policy == "carry":
        assert states == [SlotStatus.SCORED] * 3
        return
    assert states == [SlotStatus.FAILED, SlotStatus.SCORED, SlotStatus.SCORED]
    (cut,) = [record for record in records if record.status is RecordStatus.FAILED]
    assert cut.failure is not None
    assert (cut.failure.kind, "step 6" in cut.failure.message) == ("cut", True)
    assert [record.status for record in records].count(RecordStatus.READY) == 2


async def test_a_trajectory_that_went_on_in_this_process_began_with_its_first_tokens(
    store: Store, tmp_path: Path
) -> None:
    """Else one that is taken over every few steps would never be cut, and its group would wait for it."""
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    await store.tasks.load([task("a", slots=2)])
    cut = []
    for _ in range(2):
        claim = await store.claims.claim(split="train", owner="old", lease_seconds=60)
        assert claim is not None
        await store.records.create(claim)
        cut.append(claim)
    old = cut[0]
    await store.database["Record"].update_one({"_id": old.record_id}, {"$set": {"min_version": 0}})
    await store.attempts.release(old)
    going_on = await store.claims.claim(split="train", owner="new", lease_seconds=60)
    assert going_on is not None
    assert going_on.record_id == old.record_id
    asked: list[set[str]] = []

    async def cancel(records: set[str]) -> list[Claim]:
        asked.append(records)
        return []

    held: Any = SimpleNamespace(claims=[going_on, cut[1]], cancel=cancel)
    tails = housekeeping.Tails(store, held, 2)
    tails._step = 2
    tails.begin(going_on)
    tails.begin(cut[1])
    await tails._cut()
    assert asked == [{going_on.record_id}]


async def scored(store: Store, count: int) -> None:
    while True:
        records = await store.records.by_task("train/0/a")
        if sum(record.score is not None for record in records) == count:
            return
        await asyncio.sleep(0.05)
