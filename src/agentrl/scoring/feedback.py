"""The scorer ``feedback``: the score of a trajectory comes from people, at any time after it was sampled."""

from __future__ import annotations

from agentrl.documents.task import FEEDBACK
from agentrl.errors import ScorerError
from agentrl.scoring.scorers import ScorerContext, scorer


@scorer(FEEDBACK)
async def feedback(context: ScorerContext) -> float:
    """Raise ScorerError: runs hand a trajectory without feedback back instead (``rollout.scoring``)."""
    raise ScorerError(
        "the trajectory has no feedback",
        hint="`agentrl gateway` takes it by POST /feedback; an evaluation needs a scorer that computes",
    )
