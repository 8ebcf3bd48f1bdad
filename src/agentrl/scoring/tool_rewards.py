"""Scorer ``tool_rewards``: the rewards that the trajectory's tools gave."""

from __future__ import annotations

from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer


@scorer("tool_rewards")
async def tool_rewards(context: ScorerContext) -> ScoreResult:
    """Return the sum of all rewards that tools gave, to calls and to their state; 0 without one.

    The score includes every reward, so no reward is also credited to a single model call.
    """
    by_tool = {
        name: sum(given.get("calls", ())) + (given.get("state") or 0.0)
        for name, given in context.tool_rewards.items()
    }
    return ScoreResult(float(sum(by_tool.values())), {"by_tool": by_tool}, turn_rewards=())
