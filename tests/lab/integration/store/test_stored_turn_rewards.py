"""Turn rewards on a real server: from the score to the training data, and checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_run as run

from agentrl.config.schema import GroupConfig
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import task_key
from agentrl.lab import cli_db
from agentrl.lab.check.checks import Checks
from agentrl.lab.cli_db import check_options
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def test_turn_rewards_reach_the_training_data_and_check_out(store: Store) -> None:
    key = task_key("train", 0, "rewarded")
    await run.add_task(store, key, 0, generations=2)
    for score, rewards in ((1.0, [0.5]), (0.0, [0.25])):
        claimed = await store.claims.claim(split="train", owner="s", lease_seconds=60.0, max_groups_open=1)
        assert claimed is not None
        await store.records.create(claimed)
        await store.records.advance(claimed, RecordStatus.RUNNING)
        await store.model_calls.add(claimed, run.call(claimed, 0, 0, 2))
        await store.records.advance(claimed, RecordStatus.COMPLETED, final_answer="4")
        await store.records.advance(claimed, RecordStatus.SCORING)
        await store.attempts.score(claimed, score, {"scorer": "own", "turn_rewards": rewards})
    assert await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting() == 1
    records = sorted(await store.records.by_task(key), key=lambda record: record.traj_id)
    assert [(r.advantage, r.turn_advantages) for r in records] == [(1.0, (0.25,)), (-1.0, (-0.25,))]
    data = {item["_id"]: item async for item in store.database["DBRecordData"].find({})}
    assert [[span["advantage"] for span in data[r.id]["spans"]] for r in records] == [[1.25], [-1.25]]
    options = replace(
        check_options(cli_db.parser().parse_args(["check", "--run_name", "x"])), settle_seconds=0.0
    )
    report = await Checks(store.connection).run(options)
    named = [str(item.problem) for item in report.violations if "advantage" in str(item.problem)]
    assert named == []
    await store.database["Record"].update_one({"_id": records[1].id}, {"$set": {"turn_advantages": [7.0]}})
    report = await Checks(store.connection).run(options)
    assert any("turn advantages that its group gives" in str(item.problem) for item in report.violations)
