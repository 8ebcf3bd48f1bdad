"""``agentrl whatif`` on a real database: replays bit for bit, other losses, other groups, refusals."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from db_command import violations
from stored_run import StoredRun
from tiny_policy import write_tiny_policy

from agentrl.documents.training import TrainStep

pytestmark = pytest.mark.integration
TIMES = ("seconds", "per_second", "mfu", "groups_open", "groups_ready", "published_bytes", "stale", "quarantined")


@pytest.fixture
async def run(mongo_uri: str, tmp_path: Path) -> AsyncIterator[StoredRun]:
    """Four steps of two groups, with checkpoints of steps 2 and 4."""
    base = write_tiny_policy(tmp_path / "base")
    run = StoredRun(f"t{time.monotonic_ns()}", mongo_uri, base, tmp_path)
    await run.fill(8)
    run.train()
    yield run
    await run.drop(*(f"{run.name}_{name}" for name in ("same", "gspo", "rules")))


def exact(step: TrainStep) -> dict[str, Any]:
    """The metrics that do not depend on time."""
    return {name: value for name, value in step.metrics.items() if not any(part in name for part in TIMES)}


async def digest(run: StoredRun, name: str) -> str:
    async with await run.open(name) as store:
        newest = await store.policy_versions.latest()
    assert newest is not None
    assert newest.digest is not None
    return newest.digest


async def test_unchanged_settings_give_the_same_run_bit_for_bit(run: StoredRun) -> None:
    same = f"{run.name}_same"
    output = run.whatif(same)
    steps, again = await run.steps(), await run.steps(same)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [exact(step) for step in again] == [exact(step) for step in steps]
    assert [step.data for step in again] == [step.data for step in steps]
    assert [step.recorded and step.recorded.step for step in again] == [1, 2, 3, 4]
    assert await digest(run, same) == await digest(run, run.name)
    async with await run.open(same) as store:
        assert await violations(store) == []
