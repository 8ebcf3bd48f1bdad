"""An agent of your own: it asks once for a check before an answer counts.

Name it in the task file (``"agent_name": "custom_agent:second_look"``) or for all tasks; the folder must be
on PYTHONPATH::

    agentrl sample --run_name my_run --agent_name custom_agent:second_look …
"""

from agentrl import Outcome, Rollout, StopReason, agent


@agent("second_look")
async def second_look(rollout: Rollout) -> Outcome:
    """Run tool calls as they come; the second answer is final."""
    first = None
    while rollout.turns < rollout.max_turns:
        if rollout.context_is_full and not await rollout.reset_context():
            break
        turn = await rollout.generate()
        if turn.answer is None:
            await rollout.call_tools(turn)
        elif first is not None:
            return Outcome(StopReason.ANSWERED, turn.answer)
        else:
            first = turn.answer
            rollout.append_messages([{"role": "user", "content": "Check your answer and give it again."}])
    return Outcome(StopReason.TURNS_LIMIT if first is None else StopReason.ANSWERED, first)
