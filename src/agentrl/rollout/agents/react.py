"""``react``: calls tools and reads their results until an answer or a limit (arXiv 2210.03629)."""

from __future__ import annotations

from agentrl.documents.status import StopReason
from agentrl.rollout.agents.registry import agent
from agentrl.rollout.session import Outcome, Rollout


@agent("react", "tool_agent")
async def react(session: Rollout) -> Outcome:
    """After each model call: an answer ends the trajectory, tool calls are run, anything else goes on."""
    while session.turns < session.max_turns:
        if session.context_is_full and not await session.reset_context():
            return Outcome(StopReason.LENGTH_LIMIT)
        turn = await session.generate()
        if turn.answer is not None:
            return Outcome(StopReason.ANSWERED, turn.answer)
        limit = session.config.repetition_early_stop_times
        if 0 < limit <= turn.times_seen:
            if not (session.config.enable_repetition_compress and await session.reset_context()):
                return Outcome(StopReason.REPETITION)
            continue
        await session.call_tools(turn)
    return Outcome(StopReason.TURNS_LIMIT)
