"""An agent of your own: answers, then checks itself once before the answer counts.

Name it in the task file, or for all tasks by ``--agent_name custom_agent:second_look``; the folder must be on
PYTHONPATH. A package registers it under a short name by an entry point in the group ``agentrl.agents``.
"""

from __future__ import annotations

from agentrl.documents.status import StopReason
from agentrl.rollout.agents import agent
from agentrl.rollout.rollout import Outcome, Rollout


@agent("second_look")
async def second_look(rollout: Rollout) -> Outcome:
    """Tool calls are run as they come; the second answer is final."""
    first: str | None = None
    while rollout.turns < rollout.max_turns and not rollout.context_is_full:
        turn = await rollout.generate()
        if turn.answer is None:
            await rollout.call_tools(turn)
        elif first is None:
            first = turn.answer
            rollout.append_messages([{"role": "user", "content": "Check your answer and give it again."}])
        else:
            return Outcome(StopReason.ANSWERED, turn.answer)
    if first is not None:
        return Outcome(StopReason.ANSWERED, first)
    return Outcome(StopReason.TURNS_LIMIT)
