"""Samplers on a real database, with a scripted engine: claims, turns, scores, groups, retries, stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from ready_data import ready_data
from rollout_fakes import FakeTools, ScriptedEngine, format_of
from waiting import until

from agentrl.chat.chat_format import ChatFormat
from agentrl.columns import pool as pool_module
from agentrl.columns import scores as scoring_module
from agentrl.config.load import parse
from agentrl.config.schema import AgentConfig, ClaimConfig, GroupConfig, SamplingConfig
from agentrl.documents.mixture import MixtureSource, SourceGate
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import CallStatus, DataStatus, RecordStatus, SlotStatus, StopReason, TaskStatus
from agentrl.documents.task import Slot, Task
from agentrl.errors import EngineError, ModelError, ToolServerError
from agentrl.evaluation.policy import wait_for_shared
from agentrl.rollout import housekeeping
from agentrl.rollout import sampler as sampler_module
from agentrl.rollout.housekeeping import EpochPlan, GroupFinalizer
from agentrl.rollout.sampler import Sampler, SamplerConfig
from agentrl.rollout.setup import open_format
from agentrl.rollout.worker import Worker
from agentrl.scoring.scorers import ScoreResult
from agentrl.store.claims import GroupLimit
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "LOOK_SECONDS", 0.15)
    monkeypatch.setattr(housekeeping, "HOUSEKEEPING_SECONDS", 0.1)
    monkeypatch.setattr(pool_module, "FIRST_POLL_SECONDS", 0.05)
    monkeypatch.setattr(pool_module, "LONGEST_POLL_SECONDS", 0.05)


def task(name: str, *, split: str = "train", slots: int = 2, **fields: Any) -> Task:
    values = {"scorer": "exact", "answer": "3", **fields}
    return Task(
        id=f"{split}/0/{name}", task_id=name, split=split, epoch=0, order=0, query="1+2?",
        slots=tuple(Slot(traj_id=i) for i in range(slots)), **values,
    )  # fmt: skip


def right_then_wrong() -> Callable[[str], str]:
    """Calls the tool first; of the answers every second one is wrong."""
    answers = iter(range(1000))

    def say(prompt: str) -> str:
        if "tool\n3" not in prompt:
            return ADD
        return f"<answer>{3 if next(answers) % 2 == 0 else 4}</answer>"

    return say


class Setting:
    """A sampler on ``store`` with a scripted engine, or another ``router``; ``flags`` are of the agent."""

    def __init__(
        self, store: Store, *script: Any, split: str = "train", epochs: int = 1, router: Any = None,
        tools: Any = None, params: SamplingParams | None = None, sampling: SamplingConfig | None = None,
        claims: Mapping[str, Any] | None = None, environment_timeout: float = 30.0,
        cut_after: int | None = None, chat_format: ChatFormat | None = None,
        groups: GroupConfig | None = None, **flags: Any,
    ) -> None:  # fmt: skip
        self.store = store
        self.engine = ScriptedEngine(chat_format or format_of(), *script)
        self.tools = tools or FakeTools()
        self.stop = asyncio.Event()
        leases = ClaimConfig(**{"retry_backoff_seconds": 0.01, "drain_seconds": 0.1, **(claims or {})})
        self.worker = Worker(
            store=store, router=router or self.engine, tools=self.tools, chat_format=self.engine.chat_format,
            params=params or SamplingParams(), seed=7, agent=AgentConfig(**flags),
            sampling=sampling or SamplingConfig(), claims=leases, stop=self.stop,
            environment_timeout=environment_timeout,
        )  # fmt: skip
        self.finalizer = GroupFinalizer(store, groups or GroupConfig(), split=split, seed=0)
        plan = EpochPlan(epochs=epochs, seed=0, num_generations=2, shuffle=False)
        config = SamplerConfig(
            split=split, owner=f"o{id(self)}", concurrency=4, claims=leases, plan=plan, idle_exit_seconds=30,
            cut_after=cut_after,
        )  # fmt: skip
        self.sampler = Sampler(store, self.worker, self.finalizer, config, self.allowed)
        self.limit: int | None = None

    async def allowed(self) -> int | None:
        return self.limit

    async def run(self) -> None:
        await asyncio.wait_for(self.sampler.run(self.stop), 60)

    async def records(self, task_id: str) -> list[Record]:
        return await self.store.records.by_task(task_id)


async def test_a_tools_reward_is_credited_to_the_model_call_that_used_it(store: Store) -> None:
    await store.tasks.load([task("a", scorer="0.5*exact + 0.5*format")])
    setting = Setting(store, right_then_wrong())
    setting.tools.rewards = [1.0, 0.0]
    await setting.run()
    records = await setting.records("train/0/a")
    rewarded = next(record for record in records if record.turn_rewards == (1.0, 0.0))
    other = next(record for record in records if record is not rewarded)
    assert other.turn_rewards == (0.0, 0.0)
    assert (rewarded.turn_advantages, other.turn_advantages) == ((1.0, 0.0), (-1.0, 0.0))
    assert sorted(record.score or 0.0 for record in records) == [0.5, 1.0]
    async for data in store.database["DBRecordData"].find({}):
        record = rewarded if data["record"] == rewarded.id else other
        assert record.advantage is not None
        expected = {0: record.advantage + record.turn_advantages[0], 1: record.advantage}
        trained = {call: value for call, value in expected.items() if value != 0}
        assert {span["call"]: span["advantage"] for span in data["spans"]} == trained


async def test_two_samplers_sample_a_mixture_to_its_end_through_gates_and_epochs(store: Store) -> None:
    gates = {
        "b": SourceGate(source="a", pass_rate=0.8, groups=2),
        "c": SourceGate(source="b", pass_rate=1, groups=99),
    }
    sources = [MixtureSource(name=name, weight=1, gate=gates.get(name)) for name in "abc"]
    await store.mixtures.write(sources)
    await store.tasks.load([task(f"{name}/{n}", source=name) for name in "abc" for n in range(2)])
    settings = [Setting(store, lambda prompt: "<answer>3</answer>", epochs=2) for _ in range(2)]
    for setting in settings:
        setting.limit = 3
    await asyncio.gather(*(setting.run() for setting in settings))
    done = await store.tasks.find("train", status=TaskStatus.COMPLETED)
    assert len(done) == len(await store.tasks.find("train")) == 12
    assert {slot.attempt for each in done for slot in each.slots} == {1}
    order = sorted((each.begun.number, each.source, each.epoch) for each in done if each.begun is not None)
    assert [number for number, _, _ in order] == [*range(1, 13)]
    opened = {each.name: each.opened and each.opened.because for each in await store.mixtures.sources()}
    assert opened == {"a": None, "b": "pass_rate", "c": "exhausted"}
    assert [source for _, source, _ in order][-4:] == ["c"] * 4
    for name in "abc":
        assert [epoch for _, source, epoch in order if source == name] == [0, 0, 1, 1]


async def test_a_group_is_sampled_scored_and_made_into_training_data(store: Store) -> None:
    await store.tasks.load([task("a")])
    setting = Setting(store, right_then_wrong())
    await setting.run()
    finished = await store.tasks.get("train/0/a")
    assert finished is not None
    assert finished.status is TaskStatus.COMPLETED
    assert finished.group is not None
    assert finished.group["mean_score"] == 0.5
    assert sorted(slot.score for slot in finished.slots if slot.score is not None) == [0.0, 1.0]
    records = await setting.records("train/0/a")
    assert {record.status for record in records} == {RecordStatus.READY}
    assert sorted(record.advantage for record in records if record.advantage is not None) == [-1.0, 1.0]
    for record in records:
        assert (record.turns, record.tool_calls, record.stop_reason) == (2, 1, StopReason.ANSWERED)
        assert (record.min_version, record.max_version) == (3, 3)
        assert record.completed_at is not None
        assert record.scored_at is not None
        assert record.completed_at <= record.scored_at
        calls = await store.model_calls.by_record(record.id)
        assert [call.index for call in calls] == [0, 1]
        assert calls[0].tool_executions[0].result == "3"
    ready = await ready_data(store, "train")
    assert {meta.id for meta in ready} == {record.id for record in records}
    (data, _) = await store.training.fetch([meta.id for meta in ready])
    assert data.status is DataStatus.READY
    assert len(data.nodes) == 1


async def test_a_group_without_spread_is_abandoned(store: Store) -> None:
    await store.tasks.load([task("a")])
    setting = Setting(store, "<answer>3</answer>")
    await setting.run()
    records = await setting.records("train/0/a")
    assert {record.status for record in records} == {RecordStatus.ABANDONED}
    assert records[0].abandoned_because == "no spread in the group's scores"
    assert await ready_data(store, "train") == []


@pytest.mark.parametrize(
    ("script", "fields", "kind"),
    [
        ([EngineError("no engine")], {}, "engine"),
        (["x"], {"agent_name": "test_sampling:broken_agent"}, "internal"),
    ],
)
async def test_a_failure_is_retried_and_never_a_zero(
    store: Store, script: list[Any], fields: dict[str, Any], kind: str
) -> None:
    await store.tasks.load([task("a", slots=1, **fields)])
    setting = Setting(store, *script, claims={"max_attempts": 2})
    await setting.run()
    finished = await store.tasks.get("train/0/a")
    assert finished is not None
    assert finished.status is TaskStatus.COMPLETED
    assert [slot.status for slot in finished.slots] == [SlotStatus.FAILED]
    records = await setting.records("train/0/a")
    assert [record.attempt for record in records] == [1, 2]
    for record in records:
        assert record.status is RecordStatus.FAILED
        assert record.failure is not None
        assert record.failure.kind == kind
        assert record.score is None


async def test_what_cannot_be_scored_is_not_sampled_again_and_never_a_zero(store: Store) -> None:
    await store.tasks.load([task("a", slots=1, scorer="test_sampling:broken_scorer")])
    setting = Setting(store, "<answer>4</answer>", claims={"max_scorings": 3})
    await setting.run()
    finished = await store.tasks.get("train/0/a")
    assert finished is not None
    assert (finished.status, finished.slots[0].status) == (TaskStatus.COMPLETED, SlotStatus.FAILED)
    assert finished.slots[0].scorings == 3
    (record,) = await setting.records("train/0/a")
    assert record.failure is not None
    assert (record.status, record.failure.kind, record.score) == (RecordStatus.FAILED, "scorer", None)
    assert len(setting.engine.prompts) == 1


async def broken_scorer(_: object) -> float:
    raise RuntimeError("broken")


async def broken_agent(_: object) -> None:
    raise RuntimeError("broken")


async def test_a_lost_tool_server_keeps_the_turns_before_it(store: Store) -> None:
    await store.tasks.load([task("a", slots=1)])
    setting = Setting(store, ADD, claims={"max_attempts": 1})
    setting.tools.raised = ToolServerError("gone")
    await setting.run()
    (record,) = await setting.records("train/0/a")
    assert record.failure is not None
    assert record.failure.kind == "tool"
    (call,) = await store.model_calls.by_record(record.id)
    assert call.status is CallStatus.COMPLETED


@pytest.mark.parametrize("error", [ToolServerError("tool server lost"), EngineError("engine lost")])
async def test_what_breaks_because_this_process_stops_is_released(store: Store, error: Exception) -> None:
    await store.tasks.load([task("a", slots=1)])
    setting = Setting(store, ADD)
    loop = asyncio.get_running_loop()

    def lost(prompt: str) -> str:
        """Fail before this process has noticed the signal that ended the server."""
        loop.call_later(0.05, setting.stop.set)
        if isinstance(error, EngineError):
            raise error
        setting.tools.raised = error
        return ADD

    setting.engine.script = [lost]
    await setting.run()
    (record,) = await setting.records("train/0/a")
    assert (record.status, record.failure) == (RecordStatus.RELEASED, None)
    finished = await store.tasks.get("train/0/a")
    assert finished is not None
    assert (finished.slots[0].status, finished.slots[0].released) == (SlotStatus.OPEN, 1)


async def test_a_trajectory_that_takes_too_long_fails_as_timeout(store: Store) -> None:
    await store.tasks.load([task("a", slots=1, agent_name="test_sampling:sleepy")])
    setting = Setting(store, "x", trajectory_timeout_seconds=0.2, claims={"max_attempts": 1})
    await setting.run()
    (record,) = await setting.records("train/0/a")
    assert record.failure is not None
    assert record.failure.kind == "timeout"


async def test_a_trajectory_that_hangs_uses_up_its_time_over_owners_that_stop(store: Store) -> None:
    await store.tasks.load([task("a", slots=1, agent_name="test_sampling:sleepy")])
    setting = Setting(store, "x")
    running = asyncio.create_task(setting.run())

    async def runs() -> bool:
        return [record.status for record in await setting.records("train/0/a")] == [RecordStatus.RUNNING]

    await until(runs)
    setting.stop.set()
    await running
    (record,) = await setting.records("train/0/a")
    assert (record.status, record.spent_seconds > 0) == (RecordStatus.RELEASED, True)
    await store.database["Record"].update_one({"_id": record.id}, {"$set": {"spent_seconds": 1e9}})
    await Setting(store, "x", claims={"max_attempts": 1}).run()
    (record,) = await setting.records("train/0/a")
    assert record.failure is not None
    assert record.failure.kind == "timeout"


async def sleepy(_: object) -> None:
    await asyncio.Event().wait()


async def test_two_samplers_share_a_split_and_open_the_next_epochs_once(store: Store) -> None:
    await store.tasks.load([task("a"), task("b")])
    settings = [Setting(store, right_then_wrong(), epochs=3) for _ in range(2)]
    await asyncio.gather(*(setting.run() for setting in settings))
    assert await store.tasks.epochs("train") == [0, 1, 2]
    assert (await store.tasks.counts("train"))[TaskStatus.COMPLETED] == 6
    assert sum(setting.sampler.scored for setting in settings) == 12


async def test_an_epoch_that_another_opens_meanwhile_is_sampled_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.tasks.load([task("a")])
    setting = Setting(store, right_then_wrong(), epochs=2)
    look = store.tasks.any_with_status

    async def look_just_before(split: str, *statuses: TaskStatus, source: str | None = None) -> bool:
        found = await look(split, *statuses, source=source)
        if not found and TaskStatus.RUNNING in statuses:
            await store.epochs.open("train", 1, 0, 2)
        return found

    monkeypatch.setattr(store.tasks, "any_with_status", look_just_before)
    await setting.run()
    assert (await store.tasks.counts("train"))[TaskStatus.COMPLETED] == 2


async def test_stopping_hands_back_what_is_held(store: Store) -> None:
    await store.tasks.load([task("a", agent_name="test_sampling:sleepy")])
    setting = Setting(store, "x")
    running = asyncio.create_task(setting.run())

    async def claimed() -> bool:
        found = await store.tasks.get("train/0/a")
        return found is not None and all(slot.status is SlotStatus.RUNNING for slot in found.slots)

    await until(claimed)
    setting.stop.set()
    await running
    found = await store.tasks.get("train/0/a")
    assert found is not None
    assert all((slot.status, slot.owner) == (SlotStatus.OPEN, None) for slot in found.slots)


async def test_no_group_is_begun_beyond_the_limit(store: Store) -> None:
    await store.tasks.load([task("a"), task("b")])
    setting = Setting(store, right_then_wrong())
    setting.limit = 0
    running = asyncio.create_task(setting.run())
    await asyncio.sleep(0.3)
    assert (await store.tasks.counts("train"))[TaskStatus.CREATED] == 2
    setting.limit = 1

    async def one_done() -> bool:
        return (await store.tasks.counts("train")).get(TaskStatus.COMPLETED) == 1

    await until(one_done)
    assert (await store.tasks.counts("train")).get(TaskStatus.CREATED) == 1
    setting.stop.set()
    await running


async def test_groups_are_begun_soon_after_engines_have_loaded_what_nobody_announces(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_POLL_SECONDS", 600.0)
    monkeypatch.setattr(sampler_module, "LOOK_SECONDS", 600.0)
    monkeypatch.setattr(sampler_module, "LAG_SECONDS", 0.05)
    monkeypatch.setattr(housekeeping, "HOUSEKEEPING_SECONDS", 600.0)
    await store.tasks.load([task("a")])
    setting = Setting(store, right_then_wrong())
    looks = iter(range(1000))

    async def allowed() -> GroupLimit:
        return GroupLimit(1) if next(looks) >= 20 else GroupLimit(0, engines_lag=True)

    setting.sampler._groups_allowed = allowed
    running = asyncio.create_task(setting.run())

    async def begun() -> bool:
        return (await store.tasks.counts("train")).get(TaskStatus.CREATED, 0) == 0

    await until(begun)
    setting.stop.set()
    await running


async def test_a_lost_claim_ends_its_trajectory(store: Store) -> None:
    await store.tasks.load([task("a", slots=1, agent_name="test_sampling:sleepy")])
    setting = Setting(store, "x", claims={"lease_seconds": 0.6})
    running = asyncio.create_task(setting.run())

    async def claimed() -> bool:
        return len(setting.sampler._pool) == 1

    await until(claimed)
    (held,) = setting.sampler._pool.claims
    await store.attempts.release(held)
    setting.limit = 0

    async def given_up() -> bool:
        return held not in setting.sampler._pool.claims

    await until(given_up)
    setting.stop.set()
    await running


async def test_an_evaluation_split_is_scored_and_makes_no_training_data(store: Store) -> None:
    split = "eval-v000003"
    await store.tasks.load([task("a", split=split, slots=1), task("b", split=split, slots=1, answer="9")])
    setting = Setting(store, ADD, "<answer>3</answer>", split=split)
    await setting.run()
    evaluated = await store.evaluations.tasks(split, "react", 0.5)
    assert sorted(score for item in evaluated for score in item.scores) == [0.0, 1.0]
    assert {item.agent for item in evaluated} == {"react"}
    assert await ready_data(store, split) == []


async def test_without_a_model_or_an_engine_the_commands_say_so(store: Store) -> None:
    configs = parse(
        ["--num_generations", "1", "--engine_wait_seconds", "0.2", "--engine_timeout_seconds", "0.1"],
        command="agentrl eval", description="", shown=[],
    )  # fmt: skip
    with pytest.raises(ModelError, match="no model is named"):
        await open_format(store, configs)
    with pytest.raises(EngineError, match=r"no live engine serves policy version 4 after 0\.2 s"):
        await wait_for_shared(store, configs, 4, tell=lambda _: None)


async def test_a_lease_that_ran_out_is_taken_over(store: Store) -> None:
    await store.tasks.load([task("a", slots=1)])
    dead = await store.claims.claim(split="train", owner="dead", lease_seconds=0.05)
    assert dead is not None
    await store.records.create(dead)
    setting = Setting(store, "<answer>3</answer>")
    await setting.run()
    (record,) = await setting.records("train/0/a")
    assert (record.id, record.score) == (dead.record_id, 1.0)
    assert [(each.attempt, each.ended) for each in record.owners] == [(1, "lease"), (2, None)]


async def test_a_late_result_is_refused_and_logged_and_the_new_owner_stands(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.tasks.load([task("a", slots=1)])
    late = await store.claims.claim(split="train", owner="late", lease_seconds=60)
    assert late is not None
    setting = Setting(store, "<answer>4</answer>")
    score_context = scoring_module.score_context

    async def overtaken(*_: Any) -> ScoreResult:
        monkeypatch.setattr(scoring_module, "score_context", score_context)
        ended = late.task.created_at
        ends = {"slots.0.lease_expires_at": ended, "lease_deadline": ended}
        await store.database["Task"].update_one({"_id": late.task.id}, {"$set": ends})
        await Setting(store, "<answer>3</answer>").run()
        return ScoreResult(0.75)

    monkeypatch.setattr(scoring_module, "score_context", overtaken)
    assert not await setting.worker.run(late)
    assert "the claim was lost; its result is dropped" in caplog.text
    (record,) = await setting.records("train/0/a")
    assert (record.attempt, record.final_answer, record.score) == (1, "4", 0.0)
    finished = await store.tasks.get(late.task.id)
    assert finished is not None
    assert (finished.status, finished.slots[0].score) == (TaskStatus.COMPLETED, 0.0)
