"""Scorers by name, and what they take and return: ``@scorer``, ``ScorerContext``, ``ScoreResult``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from agentrl.base.concurrency import end_tasks, time_limit
from agentrl.base.installation import require
from agentrl.base.process_pool import run_in_process
from agentrl.base.registry import Registry, refuse_bare
from agentrl.base.spans import Attributes, Span, tracer
from agentrl.base.user_code import contain, describe
from agentrl.documents.document import is_score, sanitize_bson, score_problem
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ToolExecution,
    branches_of,
    conversation,
    main_branch,
    of_main_role,
)
from agentrl.documents.record import CALL_ROLES, ROLE_REWARDS, TURN_REWARDS, Record
from agentrl.documents.status import CallStatus
from agentrl.documents.task import FEEDBACK, Task, scorer_weights
from agentrl.errors import ConfigError, FailureError, OutageError, ScorerError, judge
from agentrl.llm.agent_config import section_values
from agentrl.scoring.groups import (
    checked_role_rewards,
    checked_turn_rewards,
    stored_role_rewards,
    stored_turn_rewards,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCall:
    """One model call of a trajectory, as a scorer gets it."""

    content: str
    """The text of the assistant's message, without its reasoning."""
    tool_calls: tuple[str, ...]
    """The names of the tools that were run."""
    status: str
    """A value of ``CallStatus``, such as ``completed``, ``formaterror`` or ``toolfailed``."""
    tool_rewards: tuple[float, ...]
    """The rewards that tools gave to their calls."""
    role: str | None = None
    """The role that made it; None for the trajectory's own conversation."""
    dropped: bool = False
    """It is no part of the trajectory (``Record.dropped_calls``): a reward for it counts as 0."""

    @classmethod
    def of_document(cls, call: DispatchedSamplingTask, dropped: Collection[int]) -> ScoredCall:
        """Return what a scorer gets of a stored model call."""
        scored = cls.of(call.response, call.tool_executions, call.status, call.role)
        return replace(scored, dropped=call.index in dropped)

    @classmethod
    def of(
        cls,
        response: Mapping[str, Any],
        executions: Sequence[ToolExecution],
        status: CallStatus,
        role: str | None = None,
    ) -> ScoredCall:
        """Return what a scorer gets of a model call with this response and these tool executions."""
        return cls(
            content=str(response.get("content") or ""),
            tool_calls=tuple(execution.name for execution in executions),
            status=status.value,
            tool_rewards=tuple(item.reward for item in executions if item.reward is not None),
            role=role,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerContext:
    """One finished trajectory, as a scorer gets it. ``final_answer`` is None if the model gave none."""

    query: str
    final_answer: str | None
    answer: Any = None
    aug_answers: tuple[Any, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    """The messages of the last context."""
    calls: tuple[ScoredCall, ...] = ()
    """All model calls, in order."""
    meta: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    """The environment of the task."""
    tool_rewards: dict[str, Any] = field(default_factory=dict)
    """``Record.tool_rewards``."""
    agent_score: dict[str, Any] | None = None
    """``Record.agent_score``: the agent's own score, which takes the place of a scorer's."""
    agent_config_path: str = "assets/agent_config.yml"

    @property
    def accepted(self) -> tuple[str, ...]:
        """The answers that count as right, as text."""
        answers = self.answer if isinstance(self.answer, (list, tuple)) else (self.answer,)
        return tuple(str(answer) for answer in (*answers, *self.aug_answers) if answer is not None)


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """A score, usually in [0, 1], with details for the reader of the Record.

    ``turn_rewards`` are rewards of single model calls: one for each of ``ScorerContext.calls``, or
    {index of the call: reward}. They are credited to the tokens of that call only, beside the score. None
    credits the rewards that the tools gave to their calls; () credits none.
    """

    score: float
    details: dict[str, Any] = field(default_factory=dict)
    turn_rewards: Sequence[float] | Mapping[int, float] | None = None
    role_rewards: Mapping[str, float] | None = None
    """Rewards of roles, {role: reward}: a role is trained by its own reward instead of the score."""


Result = float | ScoreResult
Scorer = Callable[[ScorerContext], Awaitable[Result] | Result]
S = TypeVar("S", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class AnswerScorer:
    """A scorer ``(model_answer, ground_truth)`` or ``(model_answer, ground_truth, scorer_agent_config)``.

    ``ground_truth`` is ``{"query": …, "answer": …}``. An instance is picklable if the function is.
    """

    function: Callable[..., Any]
    count: int

    def __call__(self, context: ScorerContext) -> Any:
        """Return the function's score."""
        answer = context.final_answer or ""
        truth = {"query": context.query, "answer": context.answer, "aug_answers": list(context.aug_answers)}
        section = (section_values(context.agent_config_path, "scorer_agent"),) if self.count == 3 else ()
        return self.function(answer, truth, *section)


def _scorer_of(extension: Any) -> Any:
    """Return a function that takes a ScorerContext. Raises TypeError for other signatures."""
    if not callable(extension):
        raise TypeError(f"it is of type {type(extension).__name__}, which cannot be called")
    try:
        parameters = inspect.signature(extension).parameters.values()
    # Take built-ins as they are: inspect finds no signature for some.
    except ValueError:
        return extension
    positional = [
        item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
    ]
    required = sum(item.default is item.empty for item in positional)
    if required <= 1 or isinstance(extension, AnswerScorer):
        return extension
    if required > 3:
        taken = "(context), (answer, truth) or (answer, truth, config)"
        raise TypeError(f"it takes {required} arguments; a scorer takes {taken}")
    return AnswerScorer(extension, min(len(positional), 3))


SCORERS: Registry[Scorer] = Registry(
    "scorer",
    group="agentrl.scorers",
    convert=_scorer_of,
    built_in=(
        "agentrl.scoring.answers",
        "agentrl.scoring.judge",
        "agentrl.scoring.reward_model",
        "agentrl.environments.environment",
        "agentrl.worlds.code",
    ),
)

_BLOCKING = "agentrl_blocking"
_CHECK_ANSWER = "agentrl_check_answer"
_NAMES_IN_ANSWER = "agentrl_names_in_answer"


def scorer(
    *names: str,
    blocking: bool = False,
    check_answer: Callable[[Any], object] | None = None,
    names_in_answer: Callable[[Any], Iterable[str]] | None = None,
) -> Callable[[S], S]:
    """Register a function ``(ScorerContext) -> float | ScoreResult`` under ``names``.

    It may take ``(model_answer, ground_truth)`` or ``(model_answer, ground_truth, scorer_agent_config)`` too.
    A function that is not async runs in a worker process. So does an async one with ``blocking``: it
    computes for long, or waits without ``await``.

    Of a task's answer, ``check_answer`` raises ScorerError if the scorer cannot read it, and
    ``names_in_answer`` returns the code, servers and files that it names, as ``permissions`` writes them.
    """
    refuse_bare(names, "scorer")

    def decorate(function: S) -> S:
        setattr(function, _BLOCKING, blocking)
        setattr(function, _CHECK_ANSWER, check_answer)
        setattr(function, _NAMES_IN_ANSWER, names_in_answer)
        SCORERS.add(_scorer_of(function), *names)
        return function

    return decorate


def require_scorer(name: str) -> None:
    """Raise ConfigError unless this process can find the scorer ``name``, or every scorer of the sum."""
    for part in scorer_weights(name):
        SCORERS.get(part)
        if part == "math":
            require("math_verify", "the scorer math")


def check_answer(task: Task) -> None:
    """Raise ScorerError for an answer that a scorer of the task cannot read."""
    for name, check in _declared(task, _CHECK_ANSWER):
        try:
            check(task.answer)
        except ScorerError as error:
            raise ScorerError(f"scorer {name}: {error.message}", hint=error.hint) from error


def names_in_answer(task: Task) -> frozenset[str]:
    """Return what the task's answer names, for those of its scorers that say so."""
    return frozenset(name for _, names in _declared(task, _NAMES_IN_ANSWER) for name in names(task.answer))


def _declared(task: Task, what: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield what the scorers of a task declare, by name; nothing for one that is not here.

    A path ``module:function`` is not imported: this is asked before anybody allows the task's names.
    """
    for name in scorer_weights(task.scorer):
        if ":" in name:
            continue
        try:
            function = SCORERS.get(name)
        except ConfigError:
            continue  # it is refused where the scorer is looked for
        own = function.function if isinstance(function, AnswerScorer) else function
        if (declared := getattr(own, what, None)) is not None:
            yield name, declared


async def run_scorer(name: str, context: ScorerContext, timeout: float) -> ScoreResult:
    """Score one trajectory within ``timeout`` seconds. Its details are sanitized and name the scorer.

    A weighted sum runs its scorers at the same time; its details have theirs in ``parts``. Waiting for this
    process's own limits, such as a judge's ``max_concurrency``, does not count. Raises ScorerError for an
    exception in the scorer, a malformed result and a timeout, and ConfigError if the scorer cannot work in
    this process. Cancellation of the calling task passes through.
    """
    weights = scorer_weights(name)
    if weights == {name: 1.0}:
        result = await _run_one(name, context, timeout)
    else:
        tasks = [asyncio.create_task(_run_one(part, context, timeout)) for part in weights]
        try:
            result = _weighted(weights, dict(zip(weights, await asyncio.gather(*tasks), strict=True)))
        finally:
            # End the others: gather leaves them running when one of them fails.
            await end_tasks(*tasks)
    return _finished(name, result, context)


def checked_score(name: str, given: Any, calls: Sequence[ScoredCall]) -> dict[str, Any]:
    """Return the score that agent ``name`` gives to its trajectory with these model calls, storable.

    Raises ScorerError for anything but a finite number or a ScoreResult.
    """
    result = _checked(name, given, calls, what="agent")
    rewards = None if result.turn_rewards is None else list(result.turn_rewards)
    stored = {"score": result.score, "details": result.details, "turn_rewards": rewards}
    return stored if result.role_rewards is None else {**stored, ROLE_REWARDS: result.role_rewards}


async def score_context(name: str, context: ScorerContext, timeout: float) -> ScoreResult:
    """Return the agent's own score if there is one; else score as ``run_scorer``."""
    own = context.agent_score
    if own is None:
        return await run_scorer(name, context, timeout)
    checked = ScoreResult(own["score"], own["details"], own["turn_rewards"], own.get(ROLE_REWARDS))
    with tracer().span("score agent") as span:
        _trace(span, "agent", checked)
    return _finished(own.get("scorer", "agent"), checked, context)


def _finished(name: str, result: ScoreResult, context: ScorerContext) -> ScoreResult:
    """Return the result with the name of the scorer, with rewards of calls that tools gave, and of roles."""
    own_rewards = None if result.turn_rewards is None else list(result.turn_rewards)
    rewards = stored_turn_rewards(own_rewards, [call.tool_rewards for call in context.calls])
    roles = stored_role_rewards(result.role_rewards, [call.role for call in context.calls])
    # Drop these keys from a scorer's details: they would be read as rewards that nobody has checked.
    reserved = (TURN_REWARDS, ROLE_REWARDS, CALL_ROLES)
    own = {key: value for key, value in result.details.items() if key not in reserved}
    details = {**own, **rewards, **roles, "scorer": name}
    return ScoreResult(result.score, details, rewards.get(TURN_REWARDS), result.role_rewards)


async def _run_one(name: str, context: ScorerContext, timeout: float) -> ScoreResult:
    with tracer().span(f"score {name}") as span:
        result = await _call_one(name, context, timeout)
        _trace(span, name, result)
    return result


async def _call_one(name: str, context: ScorerContext, timeout: float) -> ScoreResult:
    async def call() -> ScoreResult:
        function = SCORERS.get(name)
        result = run_in_process(function, context) if _blocks(function) else function(context)
        return _checked(name, await result if inspect.isawaitable(result) else result, context.calls)

    try:
        async with time_limit(timeout):
            return await contain(call, f"scorer {name}", ScorerError)
    except TimeoutError as error:
        raise ScorerError(f"scorer {name} took longer than {timeout:g} s") from error
    except ConfigError:
        raise
    except FailureError as error:
        named = error.message if f"scorer {name}" in error.message else f"scorer {name}: {error.message}"
        outage = judge(name) if isinstance(error, OutageError) else error.outage
        raise ScorerError(named, hint=error.hint, outage=outage, retry_after=error.retry_after) from error


def _trace(span: Span, name: str, result: ScoreResult) -> None:
    """Add the result to the span of its scorer, as an event of the GenAI conventions too."""
    if not span.is_recording:
        return
    evaluation: Attributes = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": result.score}
    span.set({**evaluation, "agentrl.score": result.score})
    span.event("gen_ai.evaluation.result", evaluation)
    span.content("gen_ai.evaluation.explanation", lambda: result.details or None)


def _blocks(function: Scorer) -> bool:
    if isinstance(function, AnswerScorer):
        return _blocks(function.function)
    # Look at `__call__` too: an instance whose `__call__` is async is no coroutine function itself.
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return not is_async or getattr(function, _BLOCKING, False)


def _weighted(weights: Mapping[str, float], parts: Mapping[str, ScoreResult]) -> ScoreResult:
    """Return the weighted sum of scores and of turn rewards."""
    given = {part: result.turn_rewards for part, result in parts.items() if result.turn_rewards is not None}
    columns = zip(
        *([weights[part] * value for value in values] for part, values in given.items() if values),
        strict=True,
    )
    rewards = [sum(column) for column in columns] if given else None
    details = {
        part: {"weight": weights[part], "score": result.score, **result.details}
        for part, result in parts.items()
    }
    score = sum(weights[part] * result.score for part, result in parts.items())
    roles: dict[str, float] = {}
    for part, result in parts.items():
        for role, value in (result.role_rewards or {}).items():
            roles[role] = roles.get(role, 0.0) + weights[part] * value
    return ScoreResult(score, {"parts": details}, rewards, roles or None)


def _checked(name: str, result: Result, calls: Sequence[ScoredCall], what: str = "scorer") -> ScoreResult:
    """Return the result with details sanitized for BSON, and turn rewards as a list, one for each call.

    Raises ScorerError for anything but a score.
    """
    if not isinstance(result, ScoreResult):
        return ScoreResult(_number(f"{what} {name}", result), {}, None)
    details = sanitize_bson(result.details)
    if not isinstance(details, dict):
        raise ScorerError(
            f"{what} {name} returned the details {describe(result.details)}, which is not a mapping"
        )
    rewards = checked_turn_rewards(name, result.turn_rewards, len(calls))
    if rewards and any(call.dropped for call in calls):
        rewards = [0.0 if call.dropped else reward for call, reward in zip(calls, rewards, strict=True)]
    roles = checked_role_rewards(name, result.role_rewards, [call.role for call in calls], what)
    return ScoreResult(_number(f"{what} {name}", result.score), details, rewards, roles)


def _number(name: str, value: Any) -> float:
    if is_score(value):
        return float(value)
    raise ScorerError(f"{name} returned {describe(value)}, which {score_problem(value)}")


def stored_context(
    task: Task, record: Record, calls: Sequence[DispatchedSamplingTask], agent_config_path: str
) -> ScorerContext:
    """Return a scorer's input, read from stored documents; without messages if they were pruned."""
    path: Sequence[DispatchedSamplingTask] = of_main_role(
        [call for call in calls if call.index not in record.dropped_calls]
    )
    is_branched = any(call.parent not in (None, before.id) for before, call in pairwise(path))
    if is_branched or record.train_rule is not None:
        main = main_branch(branches_of(path))
        path = () if main is None else main.calls
    first = max((number for number, call in enumerate(path) if call.parent is None), default=0)
    scored = tuple(ScoredCall.of_document(call, record.dropped_calls) for call in calls)
    return ScorerContext(
        query=task.query,
        final_answer=record.final_answer,
        answer=task.answer,
        aug_answers=task.aug_answers,
        messages=tuple(conversation(path[first:])),
        calls=scored,
        meta=task.meta,
        environment=task.environment,
        tool_rewards=record.tool_rewards,
        agent_score=record.agent_score or _feedback(task, record, scored),
        agent_config_path=agent_config_path,
    )


def _feedback(task: Task, record: Record, calls: Sequence[ScoredCall]) -> dict[str, Any] | None:
    """Return the score that people gave to a trajectory that waits for their feedback; None without one."""
    reward = record.reported_reward
    if task.scorer != FEEDBACK or reward is None:
        return None
    turns = {int(call): value for call, value in reward.turn_rewards.items()} or None
    given = ScoreResult(reward.score, reward.details, turns, reward.role_rewards or None)
    return {**checked_score(FEEDBACK, given, calls), "scorer": FEEDBACK}
