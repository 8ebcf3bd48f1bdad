"""A sampler that stops keeps its unfinished generations in the database; the next one resumes them."""

import asyncio
from collections.abc import Sequence

import pytest
from rollout_fakes import END, FakeTools, format_of
from scripted_engine import Call, ScriptedEngine

from agentrl.columns import pool as pool_module
from agentrl.config.schema import AgentConfig, ClaimConfig, GroupConfig, SamplingConfig
from agentrl.documents.model_call import VersionSpan, unpack_floats, unpack_ids
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Slot, Task
from agentrl.inference.session import EngineRouter
from agentrl.rollout.housekeeping import EpochPlan, GroupFinalizer
from agentrl.rollout.sampler import Sampler, SamplerConfig
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

TEXT = "I think. <answer>3</answer>"


async def test_the_next_sampler_resumes_what_a_stopped_one_had_generated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "GRACE_SECONDS", 0.1)
    chat_format = format_of()
    ids = [*chat_format.tokens.encode(TEXT), END]
    sent = asyncio.Event()

    async def begins(call: Call) -> None:
        await call.head()
        await call.tokens(ids[:5], 5, version="5")
        sent.set()
        await asyncio.sleep(60)

    async def continues(call: Call) -> None:
        await call.head()
        rest = ids[5:] if call.ids[-5:] == ids[:5] else [END]
        await call.tokens(rest, len(rest), "stop", version="7")
        await call.done()

    await store.tasks.load([
        Task(id="train/0/a", task_id="a", split="train", epoch=0, order=0, query="1+2?", scorer="exact",
             answer="3", slots=(Slot(traj_id=0),))
    ])  # fmt: skip
    stop = asyncio.Event()
    async with ScriptedEngine(begins).serving() as engine, asyncio.timeout(60):
        running = asyncio.create_task(run_sampler(store, engine, stop))
        await sent.wait()
        await asyncio.sleep(0.2)
        stop.set()
        await running
    (released,) = await store.records.by_task("train/0/a")
    assert released.status is RecordStatus.RELEASED
    assert released.partial is not None
    assert unpack_ids(released.partial.output_ids).tolist() == ids[:5]

    async with ScriptedEngine(continues).serving() as engine, asyncio.timeout(60):
        await run_sampler(store, engine, asyncio.Event())
    *_, record = await store.records.by_task("train/0/a")
    (call,) = await store.model_calls.by_record(record.id)
    assert (record.score, record.final_answer) == (1.0, "3")
    assert unpack_ids(call.output_ids).tolist() == ids
    assert unpack_floats(call.logprobs).tolist() == pytest.approx([-token / 10 for token in ids], rel=1e-4)
    assert call.versions == (
        VersionSpan(version=5, start=0, end=5),
        VersionSpan(version=7, start=5, end=len(ids)),
    )
    assert (record.min_version, record.max_version) == (5, 7)


async def run_sampler(store: Store, engine: ScriptedEngine, stop: asyncio.Event) -> None:
    engine.vocab_size = 300

    async def live() -> Sequence[InferenceService]:
        return [engine.service("one")]

    async def no_limit() -> None:
        return None

    format_ = format_of()
    router = EngineRouter(live, tokens=format_)
    claims = ClaimConfig(retry_backoff_seconds=0.01)
    worker = Worker(
        store=store,
        router=router,
        tools=FakeTools(),
        chat_format=format_,
        params=SamplingParams(max_new_tokens=100),
        seed=7,
        agent=AgentConfig(max_turns=1, agent_name="single_turn"),
        sampling=SamplingConfig(),
        claims=claims,
        stop=stop,
    )
    plan = EpochPlan(epochs=1, seed=0, num_generations=1, shuffle=False)
    config = SamplerConfig(
        split="train", owner=engine.url, concurrency=1, claims=claims, plan=plan, idle_exit_seconds=30
    )
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    await Sampler(store, worker, finalizer, config, no_limit).run(stop)
    await router.close()
