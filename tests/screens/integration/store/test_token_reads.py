"""What the token view and the page about rewards read of a small run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import small_run as run

from agentrl.documents.status import DataStatus
from agentrl.screens.views.counts import Rewards
from agentrl.screens.views.read import TokenReads
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def test_tokens_have_what_is_stored_of_them(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    reads = TokenReads(store.connection)
    trained = await reads.trajectory(f"{run.TRAINED}/1/1")
    assert trained is not None
    assert trained.data_status is DataStatus.TRAINED
    assert [step.step for step in trained.steps] == [1]
    assert trained.steps[0].metrics == {"loss": 0.1}
    assert trained.locations == {0: str(tmp_path / "weights" / "v000000")}
    first = trained.calls[0]
    assert first.ids.tolist() == [1, 1, 2, 3]
    assert first.logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert first.versions.tolist() == [0, 0, 0, 0]
    assert first.advantages.tolist() == [1.0] * 4

    abandoned = await reads.trajectory(f"{run.ABANDONED}/1/1")
    assert abandoned is not None
    assert (abandoned.data_status, abandoned.steps) == (None, [])
    assert np.isnan(abandoned.calls[1].advantages).all()
    assert await reads.trajectory("nothing") is None


async def test_scored_trajectories_have_the_opinions_of_all_scorers(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    details = {"scorer": "1.0*judge + 0.5*exact", "parts": {
        "judge": {"score": 1.0, "judge": "m", "reply": "Correct"}, "exact": {"score": 0.0}}}  # fmt: skip
    judged = f"{run.READY}/1/1"
    await store.database["Record"].update_one(
        {"_id": judged},
        {"$set": {"score_details": details, "final_answer": "x" * 1000,
                  "rescored": {"score": 0.25, "details": {"scorer": "later"}}}},
    )  # fmt: skip
    await store.labels.put(judged, by="ann", label="wrong", score=0.0)
    rewards = Rewards(store.connection)
    found = {row.id: row for row in await rewards.newest("train")}
    assert set(found) == {
        judged, f"{run.READY}/0/1", f"{run.TRAINED}/0/2", f"{run.TRAINED}/1/1", f"{run.ABANDONED}/1/1"
    }  # fmt: skip
    assert found[judged].opinions == {
        "1.0*judge + 0.5*exact": 1.0, "judge": 1.0, "exact": 0.0, "later": 0.25, "people": 0.0
    }  # fmt: skip
    assert found[judged].judges == {"judge"}
    assert found[judged].answer == "x" * 300
    assert found[f"{run.READY}/0/1"].opinions == {"exact": 0.0}
    assert len(await rewards.newest("train", limit=2)) == 2
