"""What a run takes: the sums of its Records, by price, a step's metrics, and the limit of a sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollout_fakes import FakeTools
from small_run import add_task, build, call, claim
from test_sampling import Setting, right_then_wrong, task
from waiting import until

from agentrl.base.concurrency import end_tasks
from agentrl.columns.pool import count_gpus
from agentrl.documents.model_call import BrowseCall, Condensed, FixedModelCall, Spent, ToolExecution
from agentrl.documents.record import Record, judged
from agentrl.documents.run import InferenceService
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import task_key
from agentrl.errors import CostLimitError
from agentrl.llm.agent_config import Prices
from agentrl.rollout import setup
from agentrl.rollout.setup import CostLimit
from agentrl.store.client import Store
from agentrl.store.costs import _GOING_ON, ENDED, SUMS, Costs
from agentrl.store.model_calls import counts_of
from agentrl.tools.tool import ToolResult

pytestmark = pytest.mark.integration

BROWSED = BrowseCall(model="b", prompt_tokens=90, completion_tokens=10, cost=0.25, seconds=1.0)


def run_of_tool(seconds: float, *browsed: BrowseCall) -> ToolExecution:
    condensed = Condensed(purpose="p", original="o", chars=1, tokens=1, calls=browsed) if browsed else None
    return ToolExecution(
        name="search", arguments={}, result="r", error=False, seconds=seconds, condensed=condensed
    )


async def stored(store: Store, record: str) -> Record:
    found = await store.records.get(record)
    assert found is not None
    return found


class SlowTools(FakeTools):
    """Says that each call took a second."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return replace(await super().call(name, arguments), seconds=1.0)


async def test_a_call_that_is_written_again_counts_what_it_adds(store: Store) -> None:
    await add_task(store, task_key("train", 0, "a"), 0)
    held = await claim(store)
    first = replace(call(held, 0, 0, 2), tool_executions=(run_of_tool(0.5),))
    await store.model_calls.add(held, first)
    more = replace(first, revision=1, tool_executions=(run_of_tool(2.0, BROWSED), run_of_tool(0.5)))
    await store.model_calls.add(held, more, new_executions=[1], new_spent=[more.spent.since(first.spent)])
    fixed = FixedModelCall(model="f", base_url="u", prompt_tokens=7, completion_tokens=3, cost=0.5)
    other = replace(call(held, 1, 0, 8), fixed=fixed, generate_seconds=9.0)
    await store.model_calls.add(held, other)
    record = await stored(store, held.record_id)
    assert (record.tool_calls, record.generate_seconds) == (2, 0.1)  # those of the policy alone
    assert (record.tool_seconds, record.api_tokens, record.api_cost) == (2.5, 110, 0.75)
    counts = counts_of([more])  # as if the second call were dropped
    assert (counts["tool_seconds"], counts["api_tokens"], counts["api_cost"]) == (2.5, 100, 0.25)
    assert counts["generate_seconds"] == 0.1


def test_what_nothing_was_added_to_adds_nothing() -> None:
    assert Spent(1.0, 2, 3.0).since(Spent(1.0, 2, 3.0)) == {
        "tool_seconds": 0.0,
        "api_tokens": 0,
        "api_cost": 0.0,
    }


async def test_the_sums_of_a_run_and_its_money(store: Store, tmp_path: Path) -> None:
    await build(store, tmp_path)
    await add_task(store, task_key("train", 0, "judged"), 9, generations=1)
    held = await claim(store)
    while held.task.task_id != "judged":
        held = await claim(store)
    for status in (RecordStatus.COMPLETED, RecordStatus.SCORING):
        await store.records.advance(held, status)
    paid = {"judge": "j", "prompt_tokens": 30, "completion_tokens": 5, "cost": 2.0, "seconds": 4.0}
    mine = {"cost": 99.0, "seconds": 99.0}  # of a scorer that asked no judge
    details = {"parts": {"agentcpm": paid, "own": mine}, "scorer": "agentcpm + own"}
    await store.attempts.score(held, 1.0, details)
    service = InferenceService(id="e", url="u", engine="local", model="m", gpus=2, host="h", pid=1)
    await store.services.register(service)
    engines = store.database["InferenceService"]
    await engines.update_one({}, [{"$set": {"started_at": {"$subtract": ["$heartbeat", 3_600_000]}}}])
    await store.database["TrainStep"].update_many({}, {"$set": {"metrics.gpu_seconds": 1800.0}})
    costs = await Costs(store.connection).read(None)
    assert (costs.engine_gpu_seconds, costs.trainer_gpu_seconds, costs.total) == (7200.0, 1800.0, None)
    assert (costs.judge_tokens, costs.judge_seconds, costs.judge_cost) == (35, 4.0, 2.0)
    calls = await store.database["DispatchedSamplingTask"].count_documents({})
    assert costs.generate_seconds == pytest.approx(0.1 * calls)
    assert costs.informative_groups == 2
    priced = await Costs(store.connection).read(Prices(gpu_hour=4.0, tool_second=1.0))
    assert priced.total == pytest.approx(2.5 * 4 + costs.tool_seconds + 2.0)
    run, trajectory, group = priced.shares()
    assert (run.of, run.api_cost, group.of) == ("run", 2.0, "informative group")
    assert group.total == pytest.approx((priced.total or 0) / 2)
    assert trajectory.gpu_seconds == pytest.approx(9000 / costs.trajectories)


async def test_of_ended_trajectories_costs_read_an_index_alone(store: Store, tmp_path: Path) -> None:
    await build(store, tmp_path)
    going_on = await store.database["Record"].count_documents({"status": {"$in": _GOING_ON}})
    sums = {"$group": {"_id": None, **SUMS}}
    for query, read in (({"status": {"$in": ENDED}}, 0), ({"status": {"$in": _GOING_ON}}, going_on)):
        command = {"aggregate": "Record", "pipeline": [{"$match": query}, sums], "cursor": {}}
        plan = await store.database.command({"explain": command, "verbosity": "executionStats"})
        text = str(plan)
        assert "COLLSCAN" not in text
        assert f"'totalDocsExamined': {read}" in text
    seen = {"$match": {"answer_seen_in": {"$gt": ""}}}
    by_tool = {"$group": {"_id": "$answer_seen_in", "record": {"$max": "$_id"}}}
    command = {"aggregate": "Record", "pipeline": [seen, by_tool], "cursor": {}}
    plan = await store.database.command({"explain": command, "verbosity": "queryPlanner"})
    assert "'FETCH'" not in str(plan)
    assert "COLLSCAN" not in str(plan)


async def test_a_teacher_and_the_engine_of_an_evaluation_cost_what_engines_do_and_are_no_samplers(
    store: Store,
) -> None:
    counting = asyncio.create_task(count_gpus(store, 2))
    processes = store.database["SamplerProcess"]
    await until(lambda: processes.count_documents({}))
    await end_tasks(counting)
    hour = [{"$set": {"started_at": {"$subtract": ["$heartbeat", 3_600_000]}, "ended_at": None}}]
    await processes.update_one({}, hour)
    assert (await Costs(store.connection).read(None)).engine_gpu_seconds == 7200.0
    assert await store.samplers.all() == []
    assert (await store.services.liveness("train", 60.0)).samplers == {}


def test_the_judges_of_the_parts_of_a_score_are_counted() -> None:
    paid = {"judge": "j", "prompt_tokens": 3, "completion_tokens": 2, "seconds": 0.5, "cost": 0.25}
    own = {"judge": 3, "seconds": 9.0}
    broken = {"judge": "j", "seconds": float("nan"), "prompt_tokens": "many", "cost": None}
    parts = {"a": paid, "b": own, "c": broken, "d": 1.0}
    sums = {"judge_tokens": 10, "judge_seconds": 1.0, "judge_cost": 0.5}
    assert judged({**paid, "parts": parts}) == sums
    assert judged({"parts": [paid]}) == {"judge_tokens": 0, "judge_seconds": 0, "judge_cost": 0}


async def test_a_run_without_anything_costs_nothing(store: Store) -> None:
    costs = await Costs(store.connection).read(Prices(gpu_hour=1.0))
    assert (costs.total, costs.shares()) == (0.0, [])


async def test_a_sampler_counts_and_a_step_sums(store: Store) -> None:
    await store.tasks.load([task("a")])
    await Setting(store, right_then_wrong()).run()
    records = await store.records.by_task("train/0/a")
    calls = [call for each in records for call in await store.model_calls.by_record(each.id)]
    assert sum(each.tool_seconds for each in records) == pytest.approx(
        sum(run.seconds for call in calls for run in call.tool_executions)
    )
    spent = await store.training.spent(["train/0/a"])
    assert spent["generate_seconds"] == pytest.approx(sum(call.generate_seconds for call in calls))
    assert (spent.get("api_cost"), spent["judge_seconds"]) == (None, 0.0)
    assert await store.training.spent(["train/0/none"]) == {}


async def test_a_limit_ends_a_sampler_and_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "_COST_SECONDS", 0.05)
    await store.tasks.load([task(name) for name in "abcd"])
    setting = Setting(store, right_then_wrong(), tools=SlowTools())
    limit = CostLimit(store, Prices(tool_second=1e9), 1.0)
    watching = asyncio.create_task(limit.watch(setting.stop))
    await setting.run()
    await watching
    with pytest.raises(CostLimitError, match="--max_cost is 1") as caught:
        limit.check()
    assert caught.value.exit_code == 5
    counts = await store.tasks.counts("train", 0)
    assert sum(counts.values()) == 4
    assert await store.database["Task"].count_documents({"slots.status": "running"}) == 0


async def test_without_a_limit_nothing_is_read(store: Store) -> None:
    limit = CostLimit(store, None, None)
    await asyncio.wait_for(limit.watch(asyncio.Event()), 1)
    limit.check()
