"""Groups by their rewards on a real server: dropped without spread; shaped, and by turn, they check out."""

from __future__ import annotations

import pytest
import small_run as run
from db_command import violations
from ready_data import ready_data

from agentrl.config.schema import GroupConfig
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim, task_key
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

ROOM = 1
"""Groups that may be open."""


async def take(store: Store) -> Claim | None:
    claimed = await store.claims.claim(split="train", owner="s", lease_seconds=60.0, max_groups_open=ROOM)
    if claimed is not None:
        await store.records.create(claimed)
        await store.records.advance(claimed, RecordStatus.RUNNING)
    return claimed


async def test_a_group_whose_rewards_are_equal_is_dropped_and_sampling_refills(store: Store) -> None:
    for order in range(4):
        await run.add_task(store, task_key("train", 0, str(order)), order)
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    told = []
    for order, scores in enumerate(((1.0, 1.0), (0.0, 0.0), (0.0, 1.0))):
        for value in scores:
            claimed = await take(store)
            assert claimed.task.order == order
            await run.score(store, claimed, value)
        assert await finalizer.run_waiting() == 1
        told.append(await store.groups.count_open("train"))
    assert told == [0, 0, 1]
    assert await take(store) is None
    assert {item.task for item in await ready_data(store, "train")} == {task_key("train", 0, "2")}


async def test_shaped_rewards_keep_the_scores_and_check_out(store: Store) -> None:
    key = task_key("train", 0, "long")
    await run.add_task(store, key, 0, generations=3)
    config = GroupConfig(overlong_limit=8, overlong_buffer=4, overlong_penalty=0.5)
    for value in (1.0, 0.0, 1.0):
        claimed = await take(store)
        if claimed.traj_id == 2:
            await store.model_calls.add(claimed, run.call(claimed, 0, 0, 2))
            await store.records.advance(claimed, RecordStatus.COMPLETED, final_answer="4")
            await store.records.advance(claimed, RecordStatus.SCORING)
            await store.attempts.score(claimed, value, {"scorer": "exact"})
        else:
            await run.score(store, claimed, value)
    assert await GroupFinalizer(store, config, split="train", seed=0).run_waiting() == 1
    records = sorted(await store.records.by_task(key), key=lambda record: record.traj_id)
    assert [(r.score, r.generated_tokens) for r in records] == [(1.0, 8), (0.0, 8), (1.0, 4)]
    assert [r.advantage for r in records] == pytest.approx([0.25, -1.25, 1.0])
    assert not any("advantage" in found for found in await violations(store))
    await store.database["Record"].update_one({"_id": records[2].id}, {"$set": {"advantage": 0.5}})
    assert any("advantage that its group gives" in found for found in await violations(store))


async def test_turn_rewards_reach_the_training_data_and_check_out(store: Store) -> None:
    key = task_key("train", 0, "rewarded")
    await run.add_task(store, key, 0, generations=2)
    for score, rewards in ((1.0, [0.5]), (0.0, [0.25])):
        claimed = await take(store)
        assert claimed is not None
        await store.model_calls.add(claimed, run.call(claimed, 0, 0, 2))
        await store.records.advance(claimed, RecordStatus.COMPLETED, final_answer="4")
        await store.records.advance(claimed, RecordStatus.SCORING)
        await store.attempts.score(claimed, score, {"scorer": "own", "turn_rewards": rewards})
    assert await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting() == 1
    records = sorted(await store.records.by_task(key), key=lambda record: record.traj_id)
    assert [(r.advantage, r.turn_advantages) for r in records] == [(1.0, (0.25,)), (-1.0, (-0.25,))]
    data = {item["_id"]: item async for item in store.database["DBRecordData"].find({})}
    assert [[span["advantage"] for span in data[r.id]["spans"]] for r in records] == [[1.25], [-1.25]]
    assert not any("advantage" in found for found in await violations(store))
    await store.database["Record"].update_one({"_id": records[1].id}, {"$set": {"turn_advantages": [7.0]}})
    assert any("turn advantages that its group gives" in found for found in await violations(store))
