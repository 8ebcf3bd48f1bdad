"""Scorers by name, and what they take and return: ``@scorer``, ``ScorerContext``, ``ScoreResult``."""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.documents.sanitize_bson import sanitize_bson
from agentrl.errors import ConfigError, FailureError, ScorerError
from agentrl.llm.deadline import Deadline
from agentrl.registry import Registry
from agentrl.user_code import contain, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerContext:
    """One finished trajectory, as a scorer gets it. ``final_answer`` is None if the model gave none."""

    query: str
    final_answer: str | None
    answer: Any = None
    aug_answers: tuple[Any, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    tool_rewards: dict[str, Any] = field(default_factory=dict)
    """``Record.tool_rewards``."""
    agent_config_path: str = "assets/agent_config.yml"

    @property
    def accepted(self) -> tuple[str, ...]:
        """The answers that count as right, as text."""
        answers = self.answer if isinstance(self.answer, (list, tuple)) else (self.answer,)
        return tuple(str(answer) for answer in (*answers, *self.aug_answers) if answer is not None)


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """A score, usually in [0, 1], with details for the reader of the Record."""

    score: float
    details: dict[str, Any] = field(default_factory=dict)


Scorer = Callable[[ScorerContext], Awaitable[float | ScoreResult]]


SCORERS: Registry[Scorer] = Registry(
    "scorer",
    group="agentrl.scorers",
    built_in=[f"agentrl.scoring.{name}" for name in ("text_match", "math", "judge", "code", "tool_rewards")],
)


def scorer(*names: str) -> Callable[[Scorer], Scorer]:
    """Register an async function ``(ScorerContext) -> float | ScoreResult`` under ``names``."""
    return SCORERS.register(*names)


async def run_scorer(name: str, context: ScorerContext, timeout: float) -> ScoreResult:
    """Score one trajectory within ``timeout`` seconds. Its details are sanitized and name the scorer.

    Waiting for this process's own limits, such as a judge's ``max_concurrency``, does not count.

    Raises ScorerError for an exception in the scorer, a malformed result and a timeout, and ConfigError if
    the scorer cannot work in this process. Cancellation of the calling task passes through.
    """

    async def call() -> ScoreResult:
        return _checked(name, await SCORERS.get(name)(context))

    try:
        async with Deadline(timeout).enforced():
            return await contain(call, f"scorer {name}", ScorerError)
    except TimeoutError as error:
        raise ScorerError(f"scorer {name} took longer than {timeout:g} s") from error
    except (ConfigError, ScorerError):
        raise
    except FailureError as error:
        raise ScorerError(
            f"scorer {name}: {error.message}",
            hint=error.hint,
            outage=error.outage,
            retry_after=error.retry_after,
        ) from error


def _checked(name: str, result: float | ScoreResult) -> ScoreResult:
    """Return the result with details sanitized for BSON. Raises ScorerError for anything but a score."""
    if not isinstance(result, ScoreResult):
        return ScoreResult(_number(name, result), {"scorer": name})
    details = sanitize_bson(result.details)
    if not isinstance(details, dict):
        raise ScorerError(
            f"scorer {name} returned the details {describe(result.details)}, which is not a mapping"
        )
    return ScoreResult(_number(name, result.score), {**details, "scorer": name})


def _number(name: str, value: Any) -> float:
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ScorerError(f"scorer {name} returned {describe(value)}, which is not a finite number")
