"""Register agents and what manages a full context; run the agent of a trajectory, and let it score itself.

The built-in agents and context managers are here too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from agentrl.base.registry import Registry, refuse_bare
from agentrl.base.user_code import contain, contain_call
from agentrl.chat.chat_format import Message
from agentrl.config.schema import SamplingConfig
from agentrl.documents.status import StopReason
from agentrl.documents.task import Task
from agentrl.errors import (
    ConfigError,
    ContextFullError,
    FailureError,
    ScorerError,
    TrajectoryError,
    TurnsLimitError,
)
from agentrl.rollout.agent_io import Outcome, checked_outcome
from agentrl.rollout.rollout import CURRENT, ContextManager, Role, Rollout
from agentrl.scoring.groups import checked_role_rewards
from agentrl.scoring.scorers import ScorerContext, ScoreResult, checked_score

A = TypeVar("A", bound=Callable[..., Any])

Agent = Callable[[Rollout], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class AgentClass:
    """A class with ``run(rollout)`` and, if it scores its trajectories, ``evaluate(context)``, both async."""

    kind: Callable[[], Any]


def _agent(extension: Any) -> Agent | AgentClass:
    if _is_graph(extension):
        return partial(_run_graph, "langgraph", extension)
    if not callable(extension):
        raise TypeError(f"it is of type {type(extension).__name__}, not a function or class")
    if not inspect.isclass(extension):
        agent: Agent = extension
        return agent
    if _is_agent_graph(extension):
        return partial(_run_graph, "agent_graph", extension)
    for name, needed in (("run", True), ("evaluate", False)):
        method = getattr(extension, name, None)
        if (needed or method is not None) and not inspect.iscoroutinefunction(method):
            raise TypeError(f"the class {extension.__name__} has no async method {name!r}")
    return AgentClass(extension)


def _is_graph(extension: Any) -> bool:
    """Return whether ``extension`` is a compiled graph of LangGraph, or a plain function of ``cfg``."""
    if hasattr(extension, "ainvoke") and hasattr(extension, "get_graph"):
        return True
    is_plain = inspect.isfunction(extension) and not inspect.iscoroutinefunction(extension)
    return is_plain and "cfg" in inspect.signature(extension).parameters


def _is_agent_graph(extension: type) -> bool:
    """Return whether a class is an agent graph of ChatLearn: its ``run`` takes ``sampling_params``."""
    run = getattr(extension, "run", None)
    return inspect.isfunction(run) and "sampling_params" in inspect.signature(run).parameters


async def _run_graph(kind: str, extension: Any, rollout: Rollout) -> Outcome:
    return await GRAPH_RUNNERS.get(kind)(extension, rollout)


GRAPH_RUNNERS: Registry[Callable[[Any, Rollout], Awaitable[Outcome]]] = Registry(
    "runner of graphs", group="agentrl.graph_runners", built_in=("agentrl.worlds.langgraph",)
)
"""What runs the graphs of other frameworks; imported when the first one runs, since it needs LangChain."""

AGENTS: Registry[Agent | AgentClass] = Registry(
    "agent",
    group="agentrl.agents",
    built_in=("agentrl.worlds.harness.agent", "agentrl.worlds.verifiers"),
    convert=_agent,
)


def check_agent(name: str, path: Path | None) -> None:
    """Raise ConfigError for an unknown agent, and for one whose ``check`` refuses its YAML file."""
    extension = AGENTS.get(name)
    check = getattr(extension.kind, "check", None) if isinstance(extension, AgentClass) else None
    if check is not None:
        check(path)


def agent(*names: str) -> Callable[[A], A]:
    """Register an async function ``(Rollout) -> Outcome`` or a class with such a method ``run``.

    A LangGraph agent is a compiled graph, a plain function ``build_graph(cfg)`` that returns one, or an agent
    graph of ChatLearn: a class with ``run(messages, sampling_params, ...)``.

    A trajectory has an instance of the class of its own. After ``run``, its method ``evaluate`` gets the
    ScorerContext and returns the score, instead of the task's scorer.
    """
    refuse_bare(names, "agent")

    def decorate(extension: A) -> A:
        AGENTS.add(_agent(extension), *names)
        return extension

    return decorate


@agent("langgraph")
async def langgraph(rollout: Rollout) -> Outcome:
    """Run the graph that ``graph: module:name`` in the agent's file names."""
    name = rollout.cfg.get("graph")
    if not isinstance(name, str):
        raise ConfigError(
            f"the agent's file {rollout.agent_cfg_path} names no graph",
            hint="write `graph: module:build_graph` into the file of --agent_cfg_path",
        )
    extension = AGENTS.get(name)
    if isinstance(extension, AgentClass):
        raise ConfigError(f"{name} is a class, not a graph", hint="name it by --agent_name instead")
    return await extension(rollout)


@agent("react", "tool_agent")
async def react(rollout: Role) -> Outcome:
    """Alternate model calls and tool calls until an answer or a limit (ReAct, arXiv 2210.03629).

    A model call without an answer and without a tool call is followed by another model call. A full context,
    and a call that was cut at its length limit, whatever its text looks like, reset the context or end the
    trajectory.
    """
    while rollout.turns < rollout.max_turns:
        if rollout.context_is_full:
            if not await rollout.reset_context():
                return Outcome(StopReason.LENGTH_LIMIT)
            continue  # a summary is a turn too
        turn = await rollout.generate()
        if turn.is_cut:
            if not await rollout.reset_context():
                return Outcome(StopReason.LENGTH_LIMIT)
            continue
        if turn.answer is not None:
            return Outcome(StopReason.ANSWERED, turn.answer)
        limit = rollout.config.repetition_early_stop_times
        if 0 < limit <= turn.times_seen:
            if not (rollout.config.enable_repetition_compress and await rollout.reset_context()):
                return Outcome(StopReason.REPETITION)
            continue
        await rollout.call_tools(turn)
    return Outcome(StopReason.TURNS_LIMIT)


@agent("multi_turn")
async def multi_turn(rollout: Rollout) -> Outcome:
    """Alternate model calls and answers of the task's environment until it ends the trajectory.

    The environment sees each message without its reasoning, and its answer is the next user message. In an
    environment with several roles, the answer also says which of them moves next (``Rollout.player``). Tool
    calls are run as by ``react``, and end the trajectory if the environment ``is_done`` then. The final
    answer is the last message.
    """
    player = rollout.player(None if rollout.environment is None else rollout.environment.first_role)
    while rollout.turns < rollout.max_turns:
        if player.context_is_full:
            if not await player.reset_context():
                return Outcome(StopReason.LENGTH_LIMIT)
            continue
        turn = await player.generate()
        if turn.is_cut:
            if not await player.reset_context():
                return Outcome(StopReason.LENGTH_LIMIT)
        elif turn.tool_calls or turn.error is not None:
            await player.call_tools(turn)
            if rollout.environment is not None and rollout.environment.is_done:
                return Outcome(StopReason.ANSWERED, turn.content)
        else:
            observation = await rollout.step(turn, player)
            if observation.done:
                return Outcome(StopReason.ANSWERED, turn.content)
            player = player if observation.role is None else rollout.player(observation.role)
    return Outcome(StopReason.TURNS_LIMIT)


@agent("single_turn", "single_turn_agent")
async def single_turn(rollout: Role) -> Outcome:
    """Make one model call without tools; a call without an answer ends at the limit of turns."""
    if rollout.context_is_full:
        return Outcome(StopReason.LENGTH_LIMIT)
    turn = await rollout.generate()
    if turn.is_cut:
        return Outcome(StopReason.LENGTH_LIMIT)
    if turn.error is not None:
        await rollout.call_tools(turn)  # nothing is run: the call's status becomes formaterror
    if turn.answer is None:
        return Outcome(StopReason.TURNS_LIMIT)
    return Outcome(StopReason.ANSWERED, turn.answer)


CONTEXT_MANAGERS: Registry[ContextManager] = Registry(
    "context manager", group="agentrl.context_managers", flag="--new_context"
)

SUMMARY_REQUEST = (
    "The conversation has become too long to go on. Write down, for yourself, everything found out so far"
    " that matters for the question: facts, numbers, sources, what was tried and failed, and what to do next."
    " Call no tool and do not answer the question yet."
)
SUMMARY_HEADING = "What you have found out so far:"

_LATEST, _KEPT = 15, 10


def context_manager(*names: str) -> Callable[[ContextManager], ContextManager]:
    """Register an async function ``(Role) -> list[Message] | None`` under ``names``.

    It gets the Rollout, which is a Role, or the role whose context is full.
    It returns the messages that the new context starts with, or None to end the trajectory.
    """
    refuse_bare(names, "context_manager")
    return CONTEXT_MANAGERS.register(*names)


@context_manager("disabled")
async def end_trajectory(rollout: Role) -> list[Message] | None:
    """Return None: a full context ends the trajectory."""
    return None


@context_manager("discard_all_tools")
async def discard_tools(rollout: Role) -> list[Message] | None:
    """Return the context without tool results and, if many messages are left, without the latest ones."""
    return without_tools(rollout.messages, fixed=len(rollout.first_messages))


@context_manager("discard_all")
async def discard_all(rollout: Role) -> list[Message] | None:
    """Return the question and the policy's own summary of everything after it."""
    # Give up before the first turn: it is the question that does not fit, and a summary would add to it.
    return None if rollout.turns == 0 else await _summary(rollout)


@context_manager("summarize")
async def summarize(rollout: Role) -> list[Message] | None:
    """Return the question, the policy's own summary, and the latest tool calls with their results.

    The latest calls are left out if they do not fit.
    """
    if rollout.turns == 0:
        return None
    # Take them first: the summary puts its request and its answer behind them.
    latest = latest_calls(rollout.messages)
    summary = await _summary(rollout)
    return [*summary, *latest] if rollout.would_fit([*summary, *latest]) else summary


async def _summary(rollout: Role) -> list[Message]:
    """Return the first messages, with the policy's summary behind the question.

    The summary is one more model call of the trajectory. It is sampled within ``--prompt_reserve_tokens``,
    and it is recorded and trained like every other call.
    """
    rollout.append_messages([{"role": "user", "content": SUMMARY_REQUEST}])
    turn = await rollout.generate()
    *before, question = rollout.first_messages
    # Take the whole text where nothing is outside of a thought: an empty summary would lose everything.
    summary = (turn.content or turn.text).strip()
    return [*before, {**question, "content": f"{question['content']}\n\n{SUMMARY_HEADING}\n{summary}"}]


def latest_calls(messages: list[Message]) -> list[Message]:
    """Return the last assistant message and the tool results that end ``messages``; empty if none do."""
    start = len(messages)
    while start and messages[start - 1]["role"] == "tool":
        start -= 1
    return messages[start - 1 :] if 0 < start < len(messages) else []


def without_tools(messages: list[Message], fixed: int = 0) -> list[Message]:
    """Return ``messages`` without tool results and without the latest assistant messages.

    Of n messages other than tool results, the last min(15, n − 10) are dropped as well, but system and user
    messages among them are kept. So are the first ``fixed`` messages.
    """
    left = [message for index, message in enumerate(messages) if index < fixed or message["role"] != "tool"]
    boundary = max(fixed, len(left) - max(0, min(_LATEST, len(left) - _KEPT)))
    return [
        message
        for index, message in enumerate(left)
        if index < boundary or message["role"] in ("system", "user")
    ]


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
    limit = None if rollout.environment is None else rollout.environment.agent_seconds
    token = CURRENT.set(rollout)
    try:
        async with rollout.time_limit(limit):
            outcome = await contain(lambda: run(rollout), f"agent {name}", FailureError)
    # Score what is there at the environment's limit, as Harbor does; the trajectory's own limit fails it.
    except TimeoutError:
        outcome = Outcome(StopReason.TIME_LIMIT)
    except ContextFullError:
        outcome = Outcome(StopReason.LENGTH_LIMIT)
    except TurnsLimitError:
        outcome = Outcome(StopReason.TURNS_LIMIT)
    finally:
        CURRENT.reset(token)
    await rollout.end_journal()
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
    # Store the last call first: rewards of calls and roles are checked against those that are stored.
    await rollout.finish()
    score = _own_score(name, rollout, outcome)
    if score is None and rollout.reported_reward is not None:
        score = rollout.reported_reward
    evaluate = getattr(instance, "evaluate", None)
    if rollout.environment is not None and rollout.environment.scored_by_tests:
        if score is None and evaluate is None:
            return
        raise ScorerError(
            f"agent {name} gives a score, and the tests of task {rollout.task.task_id} score it",
            hint="leave score, rewards and evaluate out of the agent",
        )
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
    # Average the policy's roles alone: those of fixed models are never trained.
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
