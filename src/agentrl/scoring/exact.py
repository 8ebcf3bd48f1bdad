"""``exact``: 1 if the answer equals an accepted one in normal form (numbers as numbers), else 0."""

from __future__ import annotations

from agentrl.errors import ScorerError
from agentrl.scoring.scorers import ScorerContext, scorer
from agentrl.scoring.text import same


@scorer("exact")
async def exact(context: ScorerContext) -> float:
    """Case, punctuation, English articles and thousands separators do not count."""
    if not context.accepted:
        raise ScorerError("the task has no answer to compare with")
    if context.final_answer is None:
        return 0.0
    return float(any(same(context.final_answer, answer) for answer in context.accepted))
