"""Scores and training data that nobody sampled, written past the store, are refused where they are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import small_run as run
from ready_data import ready_data

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import verifier
from agentrl.data.stream import DataStream, Freshness, StreamSettings, choose_groups
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.status import TaskStatus
from agentrl.errors import StoreError
from agentrl.rollout.housekeeping import ATTEMPTS, GroupFinalizer
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

FIRST, SECOND = f"{run.READY}/0/1", f"{run.READY}/1/1"
Forge = Callable[[Store], Awaitable[Any]]


def stream(store: Store) -> DataStream:
    settings = StreamSettings(
        groups_per_step=1, num_epochs=1, freshness=Freshness(max_staleness=9), wait_seconds=30.0
    )
    return DataStream(store, settings, verify=verifier(store))


async def test_data_of_sampled_groups_are_trained(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights", unfinished=False)
    taken = await stream(store).take(2)
    assert taken is not None
    assert [item.id for item in taken.data] == [FIRST, SECOND]


async def _record(store: Store, changes: dict[str, Any]) -> None:
    await store.database["Record"].update_one({"_id": FIRST}, {"$set": changes})


async def _slot(store: Store, changes: dict[str, Any]) -> None:
    fields = {f"slots.0.{name}": value for name, value in changes.items()}
    await store.database["Task"].update_one({"_id": run.READY}, {"$set": fields})


async def _data(store: Store, changes: dict[str, Any]) -> None:
    """Insert training data of a new name, as a sampler may."""
    document = await store.database["DBRecordData"].find_one({"_id": FIRST}) or {}
    await store.database["DBRecordData"].insert_one({**document, **changes})


async def _higher_score(store: Store) -> None:
    await _record(store, {"score": 5.0})
    await _slot(store, {"score": 5.0})


FORGERIES: dict[str, tuple[Forge, str]] = {
    "the score of a Record": (lambda s: _record(s, {"score": 5.0}), "has the score 5.0, and its slot 0.0"),
    "the score of a slot": (lambda s: _slot(s, {"score": 5.0}), "has the score 0.0, and its slot 5.0"),
    "the score of both": (_higher_score, "score: 0.0, from its model calls 5.0"),
    "another attempt": (
        lambda s: _slot(s, {"attempt": 2, "record_id": f"{run.READY}/0/2"}),
        "its slot is not scored by it",
    ),
    "an advantage": (
        lambda s: s.database["DBRecordData"].update_one({"_id": FIRST}, {"$set": {"advantage": 9.0}}),
        "advantage: 9.0",
    ),
    "tokens": (
        lambda s: s.database["DBRecordData"].update_one(
            {"_id": FIRST}, {"$set": {"input_ids": pack_ids([7] * 12)}}
        ),
        "input_ids",
    ),
    "logprobs": (
        lambda s: s.database["DBRecordData"].update_one(
            {"_id": FIRST}, {"$set": {"behavior_logprobs": pack_floats([-9.0] * 8)}}
        ),
        "behavior_logprobs",
    ),
    "more data": (
        lambda s: _data(s, {"_id": "x/0/1", "record": "x/0/1"}),
        "give no training data x/0/1",
    ),
    "data of no Task": (
        lambda s: _data(s, {"_id": "x/0/1", "record": "x/0/1", "task": "train/0/-"}),
        "it has no Task",
    ),
    "data of a group in work": (
        lambda s: _data(s, {"_id": "x/0/1", "record": "x/0/1", "task": run.UNTOUCHED}),
        "its Task is created, not completed",
    ),
}


@pytest.mark.parametrize("kind", FORGERIES)
async def test_what_does_not_follow_from_its_group_is_quarantined(
    store: Store, tmp_path: Path, kind: str
) -> None:
    await run.build(store, tmp_path / "weights")
    forge, problem = FORGERIES[kind]
    await forge(store)
    members = await store.training.ready_members("train", step=2)
    problems = await verifier(store)(await store.training.fetch([member.id for member in members]))
    assert len(problems) == 1
    (task,) = problems
    assert problem in problems[task]
    assert await stream(store)._usable(choose_groups(members, len(members)), 2) is None
    quarantined = [
        item async for item in store.database["DBRecordData"].find({"status": "quarantined"}, {"problem": 1})
    ]
    assert quarantined
    assert {item["problem"] for item in quarantined} == {problems[task]}
    left = await store.training.ready_members("train", step=2)
    assert {member.task for member in left} == {member.task for member in members} - {task}


async def test_a_trainer_takes_the_next_group_instead(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights", unfinished=False)
    await run.add_task(store, run.UNTOUCHED, 4)
    for value in (0.0, 1.0):
        await run.score(store, await run.claim(store), value, version=1)
    assert await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting() == 1
    await _record(store, {"score": 5.0})
    taken = await stream(store).take(2)
    assert taken is not None
    assert taken.groups == (run.UNTOUCHED,)


async def test_a_score_of_no_attempt_that_holds_a_slot_decides_no_group(store: Store) -> None:
    await run.add_task(store, run.READY, 0)
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    for value in (0.0, 1.0):
        await run.score(store, await run.claim(store), value)
    await _record(store, {"score": 5.0})
    with pytest.raises(StoreError, match=r"has the score 5.0, and its slot 0.0"):
        await store.groups.to_decide(run.READY)
    for _ in range(ATTEMPTS):
        assert not await finalizer.finalize(run.READY)
    task = await store.tasks.get(run.READY)
    assert task is not None
    assert (task.status, (task.group or {})["outcome"]) == (TaskStatus.COMPLETED, "failed")
    assert await ready_data(store, "train") == []
