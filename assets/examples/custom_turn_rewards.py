"""A scorer of your own that rewards single model calls beside the answer.

Name it in the task file by its path; the folder must be on PYTHONPATH. Summed with another scorer::

    {"id": "t1", "query": "…", "answer": "42", "scorer": {"exact": 1.0, "custom_turn_rewards:tool_use": 0.1}}

A call's reward is credited to the tokens of that call only (docs/scoring.md).
"""

from agentrl import ScoredCall, ScorerContext, ScoreResult, scorer


@scorer("tool_use")
async def tool_use(context: ScorerContext) -> ScoreResult:
    """Return 0, and for each model call +1 if its tools worked, −1 if one failed."""
    return ScoreResult(0.0, turn_rewards=[_reward(call) for call in context.calls])


def _reward(call: ScoredCall) -> float:
    if call.status == "toolfailed":
        return -1.0
    return 1.0 if call.tool_calls else 0.0
