"""``agentrl db check`` finds nothing in a legal history, whatever happens in it and in which order."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import small_run as run
from db_command import violations
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from legal_edges import watched
from legal_history import History

from agentrl.config.schema import GroupConfig
from agentrl.store import steps
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

KEPT = ("Run", "Admission", "TrainerLease")


async def empty(store: Store) -> None:
    """Delete every document but those that a run has once."""
    for name in await store.database.list_collection_names(filter={"type": "collection"}):
        if name not in KEPT and not name.startswith("system."):
            await store.database[name].delete_many({})


@settings(
    max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    seed=st.integers(0, 2**32 - 1),
    rules=st.builds(
        GroupConfig, balance_sample=st.booleans(), drop_zero_advantage=st.booleans(),
        min_score_spread=st.sampled_from([0.0, 0.1]), reserve_context_error_count=st.sampled_from([-1, 0]),
    ),
    operations=st.integers(10, 120),
)  # fmt: skip
async def test_every_legal_history_is_clean(
    store: Store, seed: int, rules: GroupConfig, operations: int
) -> None:
    await empty(store)
    with TemporaryDirectory() as weights, mock.patch.object(steps, "CHUNK", 1):
        # Not a Random of Hypothesis: what a history may do next depends on MongoDB's clock too,
        # and Hypothesis refuses draws that differ between two runs of one example.
        history = History(store, Path(weights), random.Random(seed), rules)
        async with watched(store) as changes:
            await history.load()
            await history.go_on(operations)
        assert changes.illegal == []
        assert await violations(store, checkpoint=history.checkpoint, clock_skew_seconds=0.0) == []


async def test_a_change_along_no_edge_is_named(store: Store) -> None:
    async with watched(store) as changes:
        await run.add_task(store, "train/0/a", 0)
        await run.claim(store)
        await store.database["Task"].update_one({"_id": "train/0/a"}, {"$set": {"status": "completed"}})
    assert changes.seen == 3, "created, running, completed; the Record began to run"
    assert changes.illegal == ["Task train/0/a: running → completed"]


async def test_an_evaluation_before_the_first_step_is_clean(store: Store, tmp_path: Path) -> None:
    """Engines serve the model itself as version 0 before any trainer publishes it."""
    await run.add_task(store, "eval/0/one", 0, generations=1)
    await run.score(store, await run.claim(store, "eval"), 1.0)
    assert await violations(store, clock_skew_seconds=0.0) == []
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    assert await violations(store, clock_skew_seconds=0.0) == []
