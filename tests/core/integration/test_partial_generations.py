"""A sampler that stops keeps its unfinished generations in the database; the next one resumes them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from rollout_fakes import END, format_of
from scripted_engine import Call, ScriptedEngine
from test_sampling import Setting, task

from agentrl.documents.model_call import VersionSpan, unpack_floats, unpack_ids
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus
from agentrl.inference.session import EngineRouter
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

TEXT = "I think. <answer>3</answer>"


async def test_the_next_sampler_resumes_what_a_stopped_one_had_generated(store: Store) -> None:
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

    await store.tasks.load([task("a", slots=1)])
    async with ScriptedEngine(begins).serving() as engine, sampler(store, engine) as setting:
        running = asyncio.create_task(setting.run())
        await sent.wait()
        await asyncio.sleep(0.2)
        setting.stop.set()
        await running
    (released,) = await store.records.by_task("train/0/a")
    assert released.status is RecordStatus.RELEASED
    assert released.partial is not None
    assert unpack_ids(released.partial.output_ids).tolist() == ids[:5]

    async with ScriptedEngine(continues).serving() as engine, sampler(store, engine) as setting:
        await setting.run()
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


@asynccontextmanager
async def sampler(store: Store, engine: ScriptedEngine) -> AsyncIterator[Setting]:
    """A sampler of single turns on an engine that is reached over HTTP."""
    engine.vocab_size = 300

    async def live() -> Sequence[InferenceService]:
        return [engine.service("one")]

    router = EngineRouter(live, tokens=format_of())
    params = SamplingParams(max_new_tokens=100)
    yield Setting(store, router=router, params=params, max_turns=1, agent_name="single_turn")
    await router.close()
