"""Scorer ``format``: whether a trajectory kept to the prescribed form, right or wrong."""

from __future__ import annotations

from agentrl.documents.status import CallStatus
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer


@scorer("format")
async def well_formed(context: ScorerContext) -> ScoreResult:
    """Return 1 if the answer is marked (``answer_schema``) and every tool call is well-formed, else 0."""
    malformed = [index for index, call in enumerate(context.calls) if call.status == CallStatus.FORMAT_ERROR]
    is_marked = context.final_answer is not None
    return ScoreResult(float(is_marked and not malformed), {"marked": is_marked, "malformed": malformed})
