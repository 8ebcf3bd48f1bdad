"""A scorer of your own: partial credit for numbers that are close.

Name it in the task file, no registration needed; the folder must be on PYTHONPATH::

    {"id": "t1", "query": "How many …?", "answer": "42", "scorer": "custom_scorer:close_number"}

A package registers it under a short name by an entry point in the group ``agentrl.scorers``.
"""

from agentrl import ScorerContext, ScoreResult, scorer


@scorer("close_number")
async def close_number(context: ScorerContext) -> ScoreResult:
    """Return 1 for the number itself, less with relative distance, 0 for no number.

    An exception would retry the trajectory, so a wrong answer must return a score.
    """
    gold = float(context.answer)
    try:
        given = float(context.final_answer or "")
    except ValueError:
        return ScoreResult(0.0, {"why": "no number"})
    distance = abs(given - gold) / max(abs(gold), 1.0)
    return ScoreResult(max(0.0, 1.0 - distance), {"distance": distance})
