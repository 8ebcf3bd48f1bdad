"""Run the agent of a trajectory, and score it: by the agent itself, or by the scorer of the task."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from statistics import fmean
from typing import Any

from agentrl.config.schema import SamplingConfig
from agentrl.documents.status import StopReason
from agentrl.documents.task import Task
from agentrl.errors import ContextFullError, FailureError, ScorerError, TrajectoryError, TurnsLimitError
from agentrl.rollout.agent_io import Outcome, checked_outcome
from agentrl.rollout.agents import Agent, AgentClass
from agentrl.rollout.rollout import CURRENT, Rollout
from agentrl.scoring.rewards import checked_role_rewards
from agentrl.scoring.scorers import ScorerContext, ScoreResult, checked_score
from agentrl.user_code import contain, contain_call


async def run_agent(
    agent: Agent | AgentClass, name: str, rollout: Rollout, sampling: SamplingConfig
) -> Outcome:
    """Run an agent, contained; validate its outcome and its own score. Raises FailureError or ConfigError.

    A ContextFullError of the agent is the outcome of a trajectory at its length limit, a TurnsLimitError that
    of one at its turns limit.
    """
    instance: Any = None
    if isinstance(agent, AgentClass):
        instance = contain_call(agent.kind, f"the class of agent {name}", TrajectoryError)
    run: Agent = instance.run if isinstance(agent, AgentClass) else agent
    token = CURRENT.set(rollout)
    try:
        outcome = await contain(lambda: run(rollout), f"agent {name}", FailureError)
    except ContextFullError:
        outcome = Outcome(StopReason.LENGTH_LIMIT)
    except TurnsLimitError:
        outcome = Outcome(StopReason.TURNS_LIMIT)
    finally:
        CURRENT.reset(token)
    await rollout.collect_tool_rewards()
    outcome = contain_call(
        lambda: checked_outcome(name, outcome), f"the outcome of agent {name}", TrajectoryError
    )
    await _score_by_agent(instance, name, rollout, outcome, sampling)
    return outcome


async def _score_by_agent(
    instance: Any, name: str, rollout: Rollout, outcome: Outcome, sampling: SamplingConfig
) -> None:
    """Set ``rollout.agent_score`` if the outcome, a report to the gateway or ``evaluate`` gives a score."""
    await rollout.finish()
    score = _own_score(name, rollout, outcome)
    if score is None and rollout.reported_reward is not None:
        score = rollout.reported_reward
    evaluate = getattr(instance, "evaluate", None)
    if score is None and evaluate is not None:
        context = scorer_context(rollout.task, rollout, outcome, sampling)
        limit = sampling.scorer_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                score = await contain(lambda: evaluate(context), f"evaluate of agent {name}", ScorerError)
        except TimeoutError as error:
            raise ScorerError(f"evaluate of agent {name} took longer than {limit:g} s") from error
        if score is None:
            raise ScorerError(
                f"evaluate of agent {name} returned None", hint="return a number or a ScoreResult"
            )
    if score is not None:
        rollout.agent_score = checked_score(name, score, rollout.scored_calls)


def _own_score(name: str, rollout: Rollout, outcome: Outcome) -> Any:
    """Return the score of an outcome, with the rewards that it gives to roles. Raises ScorerError."""
    if outcome.rewards is None:
        return outcome.score
    if isinstance(outcome.score, ScoreResult):
        return replace(outcome.score, role_rewards=outcome.rewards)
    roles = [call.role for call in rollout.scored_calls]
    rewards = checked_role_rewards(name, outcome.rewards, roles, "agent") or {}
    if outcome.score is not None:
        return ScoreResult(outcome.score, role_rewards=rewards)
    trained = [value for role, value in rewards.items() if role not in rollout.fixed_roles]
    if not trained:
        raise ScorerError(
            f"agent {name} rewards no role that the policy plays, and gives no score",
            hint="give Outcome(score=…), or the reward of a role without a fixed model",
        )
    return ScoreResult(fmean(trained), role_rewards=rewards)


def scorer_context(task: Task, rollout: Rollout, outcome: Outcome, sampling: SamplingConfig) -> ScorerContext:
    """Return the input of the scorer for a finished trajectory."""
    return ScorerContext(
        query=task.query,
        final_answer=outcome.final_answer,
        answer=task.answer,
        aug_answers=task.aug_answers,
        messages=tuple(rollout.result_messages),
        calls=tuple(rollout.scored_calls),
        meta=task.meta,
        environment=task.environment,
        tool_rewards=rollout.tool_rewards,
        agent_score=rollout.agent_score,
        agent_config_path=sampling.agent_config_path,
    )
