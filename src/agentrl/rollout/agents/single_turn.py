"""``single_turn``: one model call, no tools."""

from __future__ import annotations

from agentrl.documents.status import StopReason
from agentrl.rollout.agents.registry import agent
from agentrl.rollout.session import Outcome, Rollout


@agent("single_turn")
async def single_turn(session: Rollout) -> Outcome:
    """The answer of one call, found by the task's schema; a call without one has used its only turn."""
    if session.context_is_full:
        return Outcome(StopReason.LENGTH_LIMIT)
    turn = await session.generate()
    if turn.answer is None:
        return Outcome(StopReason.TURNS_LIMIT)
    return Outcome(StopReason.ANSWERED, turn.answer)
