"""One process of a run judges the gold slice of each step, and what it gave is kept with the judge's name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import build
from waiting import until

from agentrl.base.concurrency import background
from agentrl.columns import gold as gold_module
from agentrl.columns.gold import GoldRow, GoldSlice, watch_gold
from agentrl.config.schema import SamplingConfig
from agentrl.documents.run import GoldScore
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer
from agentrl.store.client import Store
from agentrl.store.costs import Costs

pytestmark = pytest.mark.integration

GIVEN = [1.0]


@scorer("test_gold_judge")
async def judged(context: ScorerContext) -> ScoreResult:
    return ScoreResult(GIVEN[0], {"judge": "m", "seconds": 2.0, "cost": 0.5, "prompt_tokens": 9})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gold_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(gold_module, "_REST_SECONDS", 0.05)


async def test_one_of_several_processes_judges_and_each_step_is_judged_once(
    store: Store, tmp_path: Path
) -> None:
    row = GoldRow(query="q", final_answer="a", score=1.0, scorer="test_gold_judge")
    slice_ = GoldSlice((row, row), "d1")
    sampling = SamplingConfig(judge_gold_every=1)
    watches = [watch_gold(store, slice_, sampling, f"s{number}") for number in range(3)]

    async def has(count: int) -> bool:
        return len(await store.judge_checks.finished()) == count

    async with background(*watches):
        await until(lambda: has(1))
        await build(store, tmp_path)  # commits step 1
        GIVEN[0] = 0.0
        await until(lambda: has(2))
        await asyncio.sleep(0.3)
    first, second = await store.judge_checks.finished()
    assert (first.step, second.step, first.id) == (0, 1, "d1/0")
    assert {row.model for row in first.scores} == {"m"}
    assert len(first.scores) == 2
    costs = await Costs(store.connection).read(None)
    assert (costs.judge_tokens, costs.judge_seconds, costs.judge_cost) == (36, 8.0, 2.0)


async def test_a_judging_whose_process_died_is_taken_over_and_its_late_scores_are_dropped(
    store: Store,
) -> None:
    checks = store.judge_checks
    assert await checks.begin("d/0", "d", 0, owner="a", lease_seconds=-1)
    assert await checks.begin("d/0", "d", 0, owner="b", lease_seconds=60)
    assert not await checks.begin("d/0", "d", 0, owner="c", lease_seconds=60)
    score = GoldScore(scorer="s", expected=1.0, score=0.0, model="m")
    await checks.finish("d/0", "a", [score])
    assert await checks.finished() == []
    await checks.finish("d/0", "b", [score, replace(score, score=1.0)])
    assert not await checks.begin("d/0", "d", 0, owner="c", lease_seconds=60)
    (found,) = await checks.finished()
    assert (found.owner, [row.score for row in found.scores]) == ("b", [0.0, 1.0])


async def test_a_slice_whose_judge_process_died_is_judged_by_another_one(store: Store) -> None:
    row = GoldRow(query="q", final_answer="a", score=1.0, scorer="test_gold_judge")
    assert await store.judge_checks.begin("d/0", "d", 0, owner="dead", lease_seconds=1.0)

    async def is_judged() -> bool:
        return bool(await store.judge_checks.finished())

    async with background(watch_gold(store, GoldSlice((row,), "d"), SamplingConfig(), "alive")):
        await until(is_judged)
    (found,) = await store.judge_checks.finished()
    assert found.owner == "alive"


async def test_without_a_slice_nothing_is_watched(store: Store) -> None:
    await asyncio.wait_for(watch_gold(store, None, SamplingConfig(), "s"), 1)
