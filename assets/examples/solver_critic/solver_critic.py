"""Two roles in one trajectory: a solver answers, a critic judges, the solver answers again."""

from __future__ import annotations

from agentrl import FixedModel, Outcome, Rollout, StopReason, agent

CRITIC = "You get a question and an answer. Say whether the answer is right: begin with yes or no."


@agent("solver_critic")
async def solver_critic(rollout: Rollout) -> Outcome:
    """The solver's reward is its last answer's; the critic's is whether it judged the first answer."""
    settings = rollout.cfg.get("critic")
    solver = rollout.role("solver", tools=[])
    critic = rollout.role(
        "critic",
        model=FixedModel(**settings) if settings else None,
        system_prompt=CRITIC,
        messages=[],
        tools=[],
    )
    right, judged = 0.0, []
    turn = await solver.generate()
    for _ in range(rollout.cfg.get("rounds", 1)):
        was_right = turn.answer == str(rollout.task.answer)
        critic.append_messages([
            {"role": "user", "content": f"Question: {rollout.question}\nAnswer: {turn.answer}"},
        ])  # fmt: skip
        verdict = await critic.generate()
        judged.append(verdict.content.lower().startswith("yes") == was_right)
        solver.append_messages([
            {"role": "user", "content": f"A critic says: {verdict.content}\nGive your final answer."},
        ])  # fmt: skip
        turn = await solver.generate()
    right = float(turn.answer == str(rollout.task.answer))
    rewards = {"solver": right, "critic": sum(judged) / max(1, len(judged))}
    return Outcome(StopReason.ANSWERED, turn.answer, score=right, rewards=rewards)
