"""``agentrl db rescore``: new scores, untrained groups decided again, otherwise notes beside the old."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import small_run as run
from db_command import Db, agentrl_db, violations
from pymongo.errors import AutoReconnect
from ready_data import ready_data, statuses

from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.data.finalize_group import GroupRules
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import DataStatus, RecordStatus, TaskStatus
from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError, StoreError
from agentrl.lab.regroup import Blocker, NewScore, Rescored, Rescoring
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.scoring.groups import ScoredGroup
from agentrl.scoring.scorers import ScorerContext
from agentrl.store.client import Store
from agentrl.store.mechanics import blobs
from agentrl.store.mechanics.retry import retry_outages

pytestmark = pytest.mark.integration

FIRST, SECOND = f"{run.READY}/0/1", f"{run.READY}/1/1"
SEEN: list[ScorerContext] = []


async def always_one(context: ScorerContext) -> float:
    """1 for everything."""
    SEEN.append(context)
    return 1.0


async def broken(context: ScorerContext) -> float:
    """A scorer that raises."""
    raise RuntimeError("no judge")


ONE, BROKEN = f"{__name__}:always_one", f"{__name__}:broken"


async def record(store: Store, key: str) -> Record:
    found = await store.records.get(key)
    assert found is not None
    return found


async def apply(store: Store, **scores: float) -> Rescored:
    """New scores for the trajectories ``t0``, ``t1`` of the group that waits to be trained."""
    new = {
        f"{run.READY}/{name[1:]}/1": NewScore(score=score, details={"scorer": "new"})
        for name, score in scores.items()
    }
    rules = GroupRules(config=GroupConfig(), seed=0)
    return await Rescoring(store.connection).apply(run.READY, new, lambda stored: rules.decide)


async def test_an_untrained_group_is_decided_again(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    task = await store.tasks.get(run.READY)
    before = {item.id: item.advantage for item in await store.training.fetch([FIRST, SECOND])}
    assert await apply(store, t0=1.0, t1=0.5) == Rescored(changed=2, decided_again=True)
    first = await record(store, FIRST)
    assert (first.score, first.score_details, first.status) == (1.0, {"scorer": "new"}, RecordStatus.READY)
    assert [entry["score"] for entry in first.score_history] == [0.0]
    assert first.score_history[0]["details"] == {"scorer": "exact"}
    after = {item.id: item.advantage for item in await store.training.fetch([FIRST, SECOND])}
    assert before == {FIRST: -1.0, SECOND: 1.0}
    assert after == {FIRST: 0.5, SECOND: -0.5}
    again = await store.tasks.get(run.READY)
    assert [slot.score for slot in again.slots] == [1.0, 0.5]
    assert again.group["mean_score"] == 0.75
    assert again.group["finalized_at"] == task.group["finalized_at"]
    assert await violations(store) == []


async def test_a_group_that_loses_its_spread_loses_its_data_and_gets_them_back(
    store: Store, tmp_path: Path
) -> None:
    await run.build(store, tmp_path / "weights")
    assert (await apply(store, t0=1.0, t1=1.0)).decided_again
    assert (await record(store, FIRST)).status is RecordStatus.ABANDONED
    assert (await statuses(store))[DataStatus.READY] == 0
    assert await violations(store) == []
    assert (await apply(store, t0=0.0)).decided_again
    assert (await record(store, FIRST)).status is RecordStatus.READY
    assert [entry["score"] for entry in (await record(store, FIRST)).score_history] == [0.0, 1.0]
    assert (await statuses(store))[DataStatus.READY] == 2
    assert await violations(store) == []


async def test_a_score_before_its_group_is_finalized_counts_in_it(store: Store, tmp_path: Path) -> None:
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    await run.add_task(store, run.READY, 0)
    await run.score(store, await run.claim(store), 1.0)
    assert await apply(store, t0=0.0) == Rescored(changed=1)
    await run.score(store, await run.claim(store), 1.0)
    assert await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting() == 1
    assert [item.advantage for item in await store.training.fetch([FIRST, SECOND])] == [-1.0, 1.0]
    assert await violations(store) == []


async def test_a_trained_group_keeps_its_scores(store: Store, tmp_path: Path, db: Db) -> None:
    await run.build(store, tmp_path / "weights")
    trained = f"{run.TRAINED}/1/1"
    before = await record(store, trained)
    assert "broken raised RuntimeError: no judge" in await db(
        "rescore", "--scorer", BROKEN, "--task", run.TRAINED, code=1
    )
    out = "".join([await db("rescore", "--scorer", ONE, "--task", run.TRAINED) for _ in range(2)])
    after = await record(store, trained)
    assert (after.score, after.score_details) == (before.score, before.score_details)
    assert (after.rescored["score"], after.rescored["details"]) == (1.0, {"scorer": ONE})
    assert "train: 1 groups keep their scores (trained)" in out
    assert "0.500" in out
    assert "1.000" in out
    assert await violations(store) == []


async def test_a_note_that_is_written_twice_in_an_outage_counts_its_judge_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server applies the write and the connection breaks: the call is made again."""
    await run.build(store, tmp_path / "weights")
    key = f"{run.TRAINED}/1/1"
    write, outages = Rescoring._note, iter([True])

    async def write_and_break(*given: Any) -> None:
        await write(*given)
        if next(outages, False):
            raise AutoReconnect("the connection broke after the write")

    monkeypatch.setattr(Rescoring, "_note", write_and_break)
    rules, rescoring = GroupRules(config=GroupConfig(), seed=0), Rescoring(store.connection)
    details = {"scorer": "$new", "judge": "j", "prompt_tokens": 3, "completion_tokens": 1, "cost": 0.5}
    with retry_outages(45):
        for seconds in (0.5, 0.25):  # the second is a judging of its own
            new = {key: NewScore(score=0.75, details={**details, "seconds": seconds})}
            await rescoring.apply(run.TRAINED, new, lambda stored: rules.decide)
    assert next(outages, None) is None
    found = await record(store, key)
    assert found.rescored is not None
    assert found.rescored["details"] == {**details, "seconds": 0.25}
    assert (found.judge_tokens, found.judge_seconds, found.judge_cost) == (8, 0.75, 1.0)


async def test_a_dry_run_writes_nothing_and_the_filters_choose(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.build(store, tmp_path / "weights")
    before = [entry async for entry in store.database["Record"].find()]
    assert await agentrl_db(run_config, "rescore", "--scorer", ONE, "--dry_run") == 0
    assert [entry async for entry in store.database["Record"].find()] == before
    assert "nothing written" in capsys.readouterr().out
    SEEN.clear()
    assert await agentrl_db(run_config, "rescore", "--scorer", ONE, "--record", FIRST) == 0
    assert [(context.query, context.final_answer) for context in SEEN] == [("What is 2 + 2?", "4")]
    assert [message["role"] for message in SEEN[0].messages] == ["user", "assistant", "user", "assistant"]
    assert (await record(store, FIRST)).score == 1.0
    assert (await record(store, SECOND)).score_history == ()
    assert await agentrl_db(run_config, "rescore", "--scorer", ONE, "--status", "abandoned") == 0
    with pytest.raises(StoreError, match="no scored Record like that"):
        await agentrl_db(run_config, "rescore", "--scorer", ONE, "--task", "train/0/nothing")
    with pytest.raises(ConfigError, match="unknown scorer"):
        await agentrl_db(run_config, "rescore", "--scorer", "exactt")
    assert await violations(store) == []


def second_alone(group: ScoredGroup) -> list[str]:
    """Keeps what scored above 0.9."""
    return [item.id for item in group.trajectories if item.score > 0.9]


async def test_a_group_filter_is_asked_again_where_it_may_be_imported(
    store: Store, tmp_path: Path, db: Db
) -> None:
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    await run.add_task(store, run.READY, 0)
    for score in (0.0, 1.0):
        await run.score(store, await run.claim(store), score)
    rules = GroupConfig(
        group_filter=f"{__name__}:second_alone", advantage="reward", min_score_spread=0.0
    )  # fmt: skip
    assert await GroupFinalizer(store, rules, split="train", seed=0).run_waiting() == 1
    assert [item.id for item in await ready_data(store, "train")] == [SECOND]
    words = ("rescore", "--scorer", ONE, "--record", FIRST)
    assert "may not import" in await db(*words, code=1)
    assert (await record(store, FIRST)).score == 0.0
    await db(*words, "--allowed_modules", __name__)
    assert {item.id for item in await ready_data(store, "train")} == {FIRST, SECOND}
    assert await violations(store) == []


async def test_a_step_planned_at_the_same_moment_wins_or_waits(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    step = TrainStep(id="1/2", step=2, policy_version=1, data=(FIRST, SECOND), owner="t")
    planned, rescored = await asyncio.gather(
        store.steps.plan(step), apply(store, t0=1.0, t1=0.5), return_exceptions=True
    )
    assert isinstance(rescored, Rescored)
    if isinstance(planned, BaseException):
        await store.steps.plan(step)
    data = await store.training.fetch([FIRST, SECOND])
    assert {item.status for item in data} == {DataStatus.PLANNED}
    assert (data[0].advantage == 0.5) == rescored.decided_again
    assert (rescored.kept_because is Blocker.TRAINED) == (not rescored.decided_again)
    assert await violations(store) == []


async def test_data_too_large_for_a_document_are_made_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "_LIMIT", 10)
    monkeypatch.setattr(blobs, "_CHUNK", 16)
    await run.build(store, tmp_path / "weights")
    before = await store.training.fetch([FIRST, SECOND])
    for scores in ({"t0": 1.0, "t1": 1.0}, {"t0": 0.0}):
        assert (await apply(store, **scores)).decided_again
    after = await store.training.fetch([FIRST, SECOND])
    assert [item.input_ids for item in after] == [item.input_ids for item in before]
    assert after[0].input_ids == pack_ids([10, 20, 0, 1, 2, 3, 11, 20, 0, 1, 2, 3])
    assert after[0].behavior_logprobs == pack_floats([-0.5, -0.25, -1.0, -2.0] * 2)
    files = store.database["DBRecordData.packed.files"]
    assert await files.count_documents({"_id": {"$regex": f"^{FIRST}/"}}) == 3  # ids, logprobs, routing
    chunks = store.database["DBRecordData.packed.chunks"]
    ids = await files.distinct("_id")
    assert set(await chunks.distinct("files_id")) == set(ids)


async def test_a_group_without_its_rules_or_calls_keeps_its_scores(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    new = {FIRST: NewScore(score=1.0, details={"scorer": "new"})}
    rescoring = Rescoring(store.connection)
    done = await rescoring.apply(run.READY, new, lambda rules: None)
    assert done == Rescored(changed=1, kept_because=Blocker.NO_RULES)
    await store.database["Record"].update_one({"_id": SECOND}, {"$currentDate": {"pruned_at": True}})
    assert (await apply(store, t0=1.0)).kept_because is Blocker.PRUNED
    task = await store.tasks.get(run.READY)
    assert task.status is TaskStatus.COMPLETED
