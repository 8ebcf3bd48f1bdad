"""A sampler that drains lets its running calls end, begins no other, and gives back what it holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rollout_fakes import FakeTools, ScriptedEngine, format_of
from test_sampling import ADD, Setting, task
from waiting import until

from agentrl.cli.samplers import main
from agentrl.config.schema import RunConfig
from agentrl.documents.record import Record
from agentrl.documents.run import Doing
from agentrl.documents.status import RecordStatus, SlotStatus, StopReason, Work
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.engine import Generation
from agentrl.rollout import setup
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.setup import _stay_listed
from agentrl.store import services
from agentrl.store.client import Store
from agentrl.tools.tool import ToolResult

pytestmark = pytest.mark.integration

LONG = {"drain_seconds": 60.0}
"""Longer than the test: only the end of the calls ends the wait for them."""


class Gate:
    """Holds calls until they may end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self) -> None:
        self.begun.set()
        await self.may_end.wait()


class SlowEngine(ScriptedEngine):
    """Answers a call when ``gate`` opens."""

    def __init__(self, *script: Any) -> None:
        super().__init__(format_of(), *script)
        self.gate = Gate()

    async def generate(self, *args: Any, **named: Any) -> Generation:
        await self.gate()
        return await super().generate(*args, **named)


class SlowTools(FakeTools):
    """Runs a tool when ``gate`` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        await self.gate()
        return await super().call(name, arguments)


@asynccontextmanager
async def draining(setting: Setting, gate: Gate) -> AsyncIterator[asyncio.Task[None]]:
    """Yield the running sampler, which has begun to drain while a call waits at ``gate``."""
    running = asyncio.create_task(setting.run())
    await asyncio.wait_for(gate.begun.wait(), 30)
    setting.stop.set()
    yield running
    await running


async def released(store: Store) -> Record:
    """Return the one Record, which was given back without using an attempt."""
    found = await store.tasks.get("train/0/a")
    assert found is not None
    (slot,) = found.slots
    assert (slot.status, slot.owner, slot.attempt - slot.released) == (SlotStatus.OPEN, None, 0)
    (record,) = await store.records.by_task("train/0/a")
    assert (record.status, record.failure) == (RecordStatus.RELEASED, None)
    return record


async def test_a_model_call_that_runs_ends_and_its_tools_do_not_begin(store: Store) -> None:
    await store.tasks.load([task("a", slots=1)])
    engine = SlowEngine(ADD)
    setting = Setting(store, router=engine, claims=LONG)
    async with draining(setting, engine.gate) as running:
        await asyncio.sleep(0.2)
        assert not running.done()
        engine.gate.may_end.set()
    record = await released(store)
    assert (len(engine.prompts), setting.tools.calls) == (1, [])
    (call,) = await store.model_calls.by_record(record.id)
    assert call.tool_executions == ()


async def test_a_tool_that_runs_ends_and_its_result_is_stored(store: Store) -> None:
    await store.tasks.load([task("a", slots=1)])
    tools = SlowTools()
    setting = Setting(store, ADD, "<answer>3</answer>", tools=tools, claims=LONG)
    async with draining(setting, tools.gate):
        tools.gate.may_end.set()
    record = await released(store)
    (call,) = await store.model_calls.by_record(record.id)
    assert [execution.result for execution in call.tool_executions] == ["3"]
    assert len(setting.engine.prompts) == 1


async def test_a_sampler_that_sampled_its_last_call_scores_it(store: Store) -> None:
    await store.tasks.load([task("a", slots=1)])
    engine = SlowEngine("<answer>3</answer>")
    async with draining(Setting(store, router=engine, claims=LONG), engine.gate):
        engine.gate.may_end.set()
    (record,) = await store.records.by_task("train/0/a")
    assert (record.score, record.final_answer) == (1.0, "3")


async def test_a_trajectory_that_stops_is_given_back_while_others_still_run(store: Store) -> None:
    await store.tasks.load([task("a", slots=1), task("b", slots=1, agent_name="test_draining:sleepy")])
    engine = SlowEngine(ADD)
    setting = Setting(store, router=engine, claims=LONG)
    at_once = asyncio.Event()
    running = asyncio.create_task(setting.sampler.run(setting.stop, at_once))
    await until(lambda: engine.gate.begun.is_set() and asyncio.get_running_loop() in SLEEPERS)
    setting.stop.set()
    engine.gate.may_end.set()

    async def given_back() -> bool:
        found = await store.tasks.get("train/0/a")
        return found is not None and found.slots[0].owner is None

    await until(given_back)
    await released(store)
    assert not running.done()
    at_once.set()
    await asyncio.wait_for(running, 30)
    counts = [record.status for record in await store.records.by_task("train/0/b")]
    assert counts == [RecordStatus.RELEASED]


SLEEPERS: list[object] = []


async def sleepy(rollout: Rollout) -> None:
    SLEEPERS.append(rollout.loop)
    await asyncio.Event().wait()


async def test_an_agent_cannot_turn_the_end_of_its_sampler_into_an_answer(store: Store) -> None:
    await store.tasks.load([task("a", slots=1, agent_name="test_draining:stubborn")])
    tools = SlowTools()
    setting = Setting(store, ADD, tools=tools, claims=LONG)
    async with draining(setting, tools.gate):
        tools.gate.may_end.set()
    record = await released(store)
    assert (record.final_answer, record.score) == (None, None)
    assert len(setting.engine.prompts) == 1


async def stubborn(rollout: Rollout) -> Outcome:
    turn = await rollout.generate()
    await rollout.call_tools(turn)
    for _ in range(3):
        with contextlib.suppress(BaseException):
            await asyncio.gather(rollout.generate(), return_exceptions=True)
    return Outcome(StopReason.ANSWERED, "made up")


async def test_a_call_that_does_not_end_in_time_is_cancelled(store: Store) -> None:
    await store.tasks.load([task("a", slots=1)])
    tools = SlowTools()
    async with draining(Setting(store, ADD, tools=tools, claims={"drain_seconds": 0.2}), tools.gate):
        pass
    await released(store)


@asynccontextmanager
async def listed(store: Store, name: str, stop: asyncio.Event | None = None) -> AsyncIterator[None]:
    """List the sampler ``name``; a request to drain it sets ``stop``."""
    waits = Doing(work=Work.WAITING)
    staying = asyncio.create_task(_stay_listed(store, name, stop or asyncio.Event(), lambda: waits))
    await until(lambda: _is_listed(store, name))
    try:
        yield
    finally:
        staying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await staying


async def _is_listed(store: Store, name: str) -> bool:
    return name in [each.process.id for each in await store.samplers.all()]


async def samplers(run: RunConfig, *words: str) -> None:
    """Run ``agentrl samplers WORDS`` in a thread, which has no event loop yet."""
    where = ["--run_name", run.run_name, "--db_connection_string", str(run.db_connection_string)]
    await asyncio.to_thread(main, [*words, *where])


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "SAMPLER_BEAT_SECONDS", 0.05)


@pytest.mark.usefixtures("quick_beats")
async def test_a_sampler_is_drained_by_its_name(
    store: Store, run_config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    await store.tasks.load([task("a", slots=1)])
    engine = SlowEngine(ADD)
    setting = Setting(store, router=engine, claims=LONG)
    name = setting.sampler.owner

    async def as_process() -> None:
        async with listed(store, name, setting.stop):
            await setting.run()

    running = asyncio.create_task(as_process())
    await asyncio.wait_for(engine.gate.begun.wait(), 30)
    await samplers(run_config)
    assert f"{name} " in capsys.readouterr().out
    asking = asyncio.create_task(samplers(run_config, "drain", name[:-1], "--wait_seconds", "60"))

    async def drains() -> bool:
        return [each.state for each in await store.samplers.all()] == ["draining"]

    await until(drains)
    (row,) = await store.samplers.all()
    assert (row.claims, row.process.asked_by is None) == (1, False)
    engine.gate.may_end.set()
    await asyncio.gather(running, asking)
    await released(store)
    assert await store.samplers.all() == []
    assert "ended" in capsys.readouterr().out


async def test_a_name_that_no_sampler_has_is_an_error_that_lists_them(
    store: Store, run_config: RunConfig
) -> None:
    await store.tasks.load([task("a")])
    with pytest.raises(ConfigError, match="no sampler is named 'x'") as none:
        await samplers(run_config, "drain", "x")
    assert none.value.hint == "samplers of this run: none"
    async with listed(store, "node1-7-aa"), listed(store, "node10-7-bb"):
        with pytest.raises(ConfigError) as unknown:
            await samplers(run_config, "drain", "node2")
        assert unknown.value.hint == "samplers of this run: node1-7-aa, node10-7-bb"
        with pytest.raises(ConfigError, match="begins the names of 2 samplers"):
            await samplers(run_config, "drain", "node1")


async def test_a_sampler_that_died_is_shown_and_swept_and_cannot_be_drained(
    store: Store, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.tasks.load([task("a")])
    monkeypatch.setattr(services, "_ALIVE_SECONDS", 0.05)
    await store.samplers.beat("gone", host="node1", pid=7, is_draining=False)
    await asyncio.sleep(0.1)
    (dead,) = await store.samplers.all()
    assert (dead.state, dead.process.host, dead.claims) == ("dead", "node1", 0)
    with pytest.raises(ConfigError, match="gone is dead: its last heartbeat was 0 s ago"):
        await samplers(run_config, "drain", "gone")
    monkeypatch.setattr(services, "_SWEPT_SECONDS", 0.05)
    assert await store.samplers.sweep() == 1
    assert await store.samplers.all() == []


async def test_waiting_for_a_sampler_that_dies_or_takes_too_long_is_an_error(
    store: Store, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.tasks.load([task("a")])
    await store.samplers.beat("slow", host="node1", pid=7, is_draining=False)
    with pytest.raises(AgentRLError, match="slow still drains after"):
        await samplers(run_config, "drain", "slow", "--wait_seconds", "0.1")
    monkeypatch.setattr(services, "_ALIVE_SECONDS", 1.0)
    await store.samplers.beat("slow", host="node1", pid=7, is_draining=True)
    with pytest.raises(AgentRLError, match="slow died while draining"):
        await samplers(run_config, "drain", "slow", "--wait_seconds", "60")
