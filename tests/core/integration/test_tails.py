"""Long tails: a trajectory that outlasts its steps is cut or carried on; its group does not wait."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_fakes import FakeTools, ScriptedEngine, format_of

from agentrl.columns import pool as pool_module
from agentrl.config.schema import AgentConfig, ClaimConfig, GroupConfig, SamplingConfig
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import Slot, Task
from agentrl.inference.engine import Generation
from agentrl.rollout import housekeeping
from agentrl.rollout.housekeeping import EpochPlan, GroupFinalizer
from agentrl.rollout.sampler import Sampler, SamplerConfig
from agentrl.rollout.worker import Worker
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
    monkeypatch.setattr(pool_module, "GRACE_SECONDS", 5.0)
    steps = [SimpleNamespace(step=4)]

    async def last_step() -> SimpleNamespace:
        return steps[-1]

    monkeypatch.setattr(store.steps, "last", last_step)
    await store.tasks.load([
        Task(id="train/0/a", task_id="a", split="train", epoch=0, order=0, query="1+2?", scorer="exact",
             answer="3", slots=tuple(Slot(traj_id=i) for i in range(3)))
    ])  # fmt: skip
    engine = SlowLast()
    running = asyncio.create_task(sampler(store, engine, cut_after=2 if policy == "cut" else None))
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


async def scored(store: Store, count: int) -> None:
    while True:
        records = await store.records.by_task("train/0/a")
        if sum(record.score is not None for record in records) == count:
            return
        await asyncio.sleep(0.05)


async def sampler(store: Store, engine: SlowLast, cut_after: int | None) -> None:
    claims = ClaimConfig(retry_backoff_seconds=0.01)
    worker = Worker(
        store=store,
        router=engine,
        tools=FakeTools(),
        chat_format=engine.chat_format,
        params=SamplingParams(),
        seed=7,
        agent=AgentConfig(agent_name="single_turn"),
        sampling=SamplingConfig(),
        claims=claims,
    )
    plan = EpochPlan(epochs=1, seed=0, num_generations=3, shuffle=False)
    config = SamplerConfig(
        split="train", owner="s", concurrency=3, claims=claims, plan=plan, idle_exit_seconds=30,
        cut_after=cut_after,
    )  # fmt: skip
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)

    async def no_limit() -> None:
        return None

    await Sampler(store, worker, finalizer, config, no_limit).run(asyncio.Event())
