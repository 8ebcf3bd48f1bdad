"""Sampled trajectories that wait for a score: other processes score them; failed ones are scored again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_sampling import Setting, quick, task, until

from agentrl.cli import main as cli
from agentrl.columns import outages as breaker_module
from agentrl.columns.pool import Pool
from agentrl.columns.scores import QueuedScores, score_queued
from agentrl.config.schema import ClaimConfig, RunConfig, SamplingConfig
from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.errors import ScorerError, judge
from agentrl.gateway.feedback import give_feedback
from agentrl.scoring.scorers import ScorerContext
from agentrl.store.client import Store

pytestmark = pytest.mark.integration
__all__ = ["quick"]


class Judge:
    """A judge that is down or answers; counts its calls."""

    def __init__(self) -> None:
        self.is_down = True
        self.broken = False
        self.calls = 0
        self.messages: list[tuple[dict[str, object], ...]] = []


JUDGE = Judge()


async def judged(context: ScorerContext) -> float:
    JUDGE.calls += 1
    JUDGE.messages.append(context.messages)
    if JUDGE.broken:
        raise RuntimeError("neither Correct nor Incorrect")
    if JUDGE.is_down:
        raise ScorerError("429 Too Many Requests", outage=judge("gpt"))
    return float(context.final_answer == "3")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    JUDGE.__init__()  # type: ignore[misc]
    monkeypatch.setattr(breaker_module, "FIRST_PROBE_SECONDS", 0.05)
    monkeypatch.setattr(breaker_module, "LONGEST_PROBE_SECONDS", 0.1)


async def score_all(store: Store) -> int:
    claims = ClaimConfig(retry_backoff_seconds=0.01)
    work = score_queued(store, SamplingConfig(), claims, "train", asyncio.Event(), until_empty=True)
    return await asyncio.wait_for(work, 30)


async def test_an_outage_of_the_judge_uses_up_no_attempt_and_resamples_nothing(store: Store) -> None:
    await store.tasks.load([task(name, slots=2, scorer=f"{__name__}:judged") for name in "abcdefgh"])
    setting = Setting(store, "<answer>3</answer>")
    running = asyncio.create_task(setting.run())

    async def is_reported() -> bool:
        return bool(await store.outages.ongoing())

    await until(is_reported)
    (outage,) = await store.outages.ongoing()
    assert (outage.dependency, outage.by) == ("judge gpt", setting.sampler._config.owner)
    sampled = len(setting.engine.prompts)
    assert 3 <= sampled < 16
    liveness = await store.services.liveness("train", 60.0)
    assert liveness.waiting_for_score > 0
    assert "judge gpt: down for" in liveness.describe()
    JUDGE.is_down = False
    await asyncio.wait_for(running, 60)
    assert len(setting.engine.prompts) == 16
    records = await store.records.scored("train", 0.0)
    assert {(record.attempt, record.score) for record in records} == {(1, 1.0)}
    assert len(records) == 16
    for name in "abcdefgh":
        found = await store.tasks.get(f"train/0/{name}")
        assert found is not None
        assert {(slot.scorings, slot.released) for slot in found.slots} == {(0, 0)}
    assert await store.outages.ongoing() == []


async def test_another_process_scores_what_a_sampler_left_with_the_same_input(store: Store) -> None:
    await store.tasks.load([task("a", slots=1, scorer=f"{__name__}:judged")])
    setting = Setting(store, "<answer>3</answer>")
    claim = await store.claims.claim(split="train", owner="sampler", lease_seconds=60)
    assert claim is not None
    assert not await setting.worker.run(claim)
    JUDGE.is_down = False
    await store.imports.add([f"{__name__}:judged"])
    assert await score_all(store) == 1
    assert JUDGE.messages[0] == JUDGE.messages[1]
    found = await store.tasks.get("train/0/a")
    assert found is not None
    assert (found.status, found.slots[0].score) == (TaskStatus.WAITING, 1.0)


async def test_a_queue_of_one_scorer_ends_without_what_others_score(store: Store) -> None:
    others = f"{__name__}:judged"
    await store.tasks.load([task("a", slots=1, scorer=others), task("b", slots=1, scorer="feedback")])
    setting = Setting(store, "<answer>3</answer>")
    for _ in range(2):
        claim = await store.claims.claim(split="train", owner="sampler", lease_seconds=60)
        assert claim is not None
        assert not await setting.worker.run(claim)
    assert [await store.claims.unscored("train", scorer) for scorer in (None, others, "feedback")] == [1] * 3
    await give_feedback(store, "train/0/b/0/1", {"score": 0.5})
    scores = QueuedScores(
        setting.worker.scoring, split="train", owner="me", only_scorer="feedback", until_empty=True
    )
    pool = Pool(store, scores, ClaimConfig(), concurrency=4)
    await asyncio.wait_for(pool.run(asyncio.Event()), 30)
    assert pool.filled == 1
    assert await store.claims.unscored("train", others) == 1


async def test_rescore_takes_what_failed_in_scoring_and_samples_nothing_again(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    JUDGE.broken = True
    await store.tasks.load([task("a", slots=2, scorer=f"{__name__}:judged")])
    setting = Setting(store, "<answer>3</answer>", claims={"max_scorings": 2})
    await setting.run()
    before = await store.tasks.get("train/0/a")
    assert before is not None
    assert before.status is TaskStatus.COMPLETED
    assert {slot.status for slot in before.slots} == {SlotStatus.FAILED}
    JUDGE.broken = JUDGE.is_down = False
    await store.imports.add([f"{__name__}:judged"])
    words = ["db", "rescore", "--run_name", store.run_name, "--status", "failed",
             "--db_connection_string", str(run_config.db_connection_string)]  # fmt: skip
    assert await asyncio.to_thread(cli.main, [*words, "--dry_run"]) == 0
    assert "would be scored: 2 trajectories" in capsys.readouterr().out
    assert await asyncio.to_thread(cli.main, words) == 0
    assert "scored: 2 of 2 trajectories" in capsys.readouterr().out
    after = await store.tasks.get("train/0/a")
    assert after is not None
    assert (after.status, after.group) == (TaskStatus.WAITING, None)
    assert {(slot.status, slot.score) for slot in after.slots} == {(SlotStatus.SCORED, 1.0)}
    assert len(setting.engine.prompts) == 2
    await setting.finalizer.run_waiting()
    records = await store.records.by_task("train/0/a")
    assert [(record.attempt, record.status) for record in records] == [(1, RecordStatus.ABANDONED)] * 2
