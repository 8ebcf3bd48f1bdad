"""Agents that score their own trajectories, in samplers and again by ``agentrl db rescore``."""

from __future__ import annotations

import pytest
from test_sampling import Setting, quick, task

from agentrl.documents.status import RecordStatus, StopReason
from agentrl.lab.rescore import RescoreOptions, rescore_run
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import agent
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.scorers import ScorerContext, ScoreResult
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick")]

__all__ = ["quick"]


@agent("own_score")
class OwnScore:
    """Score a trajectory by the number in its message."""

    async def run(self, rollout: Rollout) -> Outcome:
        turn = await rollout.generate()
        self.said = turn.content
        return Outcome(StopReason.ANSWERED, turn.content)

    async def evaluate(self, context: ScorerContext) -> ScoreResult:
        return ScoreResult(float(self.said), {"said": self.said})


async def test_the_own_score_of_an_agent_is_stored_and_used_again(store: Store) -> None:
    await store.tasks.load([task("a", agent_name="own_score")])
    says = iter(("0", "1"))
    setting = Setting(store, lambda prompt: next(says))
    await setting.run()
    records = await setting.records("train/0/a")
    assert sorted(record.score or 0.0 for record in records) == [0.0, 1.0]
    for record in records:
        assert record.status is RecordStatus.READY
        assert record.agent_score["score"] == record.score
        assert record.score_details == {"said": record.final_answer, "scorer": "agent"}
    own = await rescore_run(store, RescoreOptions(dry_run=True))
    assert (own.errors, own.splits["train"].changed) == ([], 0)
    other = await rescore_run(store, RescoreOptions(scorer="exact", dry_run=True))
    assert (other.errors, other.splits["train"].changed) == ([], 1)
