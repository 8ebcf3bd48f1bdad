"""Long tails: a trajectory that outlasts its steps is cut or carried on; its group does not wait."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_fakes import ScriptedEngine, format_of
from test_sampling import Setting, task

from agentrl.documents.record import Failure
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
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


@pytest.mark.parametrize("is_adopted", [True, False])
async def test_a_trajectory_is_as_old_as_its_first_token_and_not_as_its_owner(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_adopted: bool
) -> None:
    """Its first owner began after step 4, or sampled nothing; the next one starts after step 6.

    One that sampled nothing begins before its sampler has read a step.
    """
    engine = SlowLast()
    engine.prompts += [[], []]

    async def last_step() -> SimpleNamespace:
        if not is_adopted:
            await engine.waiting.wait()
        return SimpleNamespace(step=6)

    monkeypatch.setattr(housekeeping, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(store.steps, "last", last_step)
    await store.policy_versions.publish(PolicyVersion(id=9, step=4, location="v9", files=(), train_step=None))
    await store.tasks.load([task("a", slots=1)])
    claim = await store.claims.claim(split="train", owner="gone", lease_seconds=60)
    assert claim is not None
    await store.records.create(claim)
    sampled = {"_id": claim.record_id}
    await store.database["Record"].update_one(sampled, {"$set": {"min_version": 9 if is_adopted else None}})
    if is_adopted:
        await store.attempts.release(claim)
    else:
        await store.attempts.begin_anew(claim, Failure(kind="replay", message="it differs"))
    running = asyncio.create_task(Setting(store, router=engine, agent_name="single_turn", cut_after=2).run())
    async with asyncio.timeout(60):
        if not is_adopted:
            await engine.waiting.wait()
            await asyncio.sleep(0.3)
            engine.released.set()
        await running
    group = await store.tasks.get("train/0/a")
    assert group is not None
    assert [slot.status for slot in group.slots] == [SlotStatus.FAILED if is_adopted else SlotStatus.SCORED]


async def scored(store: Store, count: int) -> None:
    while True:
        records = await store.records.by_task("train/0/a")
        if sum(record.score is not None for record in records) == count:
            return
        await asyncio.sleep(0.05)
