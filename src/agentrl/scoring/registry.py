"""Scorers by name: ``@scorer``, entry points ``agentrl.scorers``, and Python paths ``module:function``."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.documents.sanitize_bson import storable
from agentrl.errors import ConfigError, FailureError, ScorerError
from agentrl.registry import Registry
from agentrl.user_code import contain, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerContext:
    """What a scorer sees of one trajectory. ``final_answer`` is None where the model gave none."""

    query: str
    final_answer: str | None
    answer: Any = None
    aug_answers: tuple[Any, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    agent_config_path: str = "assets/agent_config.yml"

    @property
    def accepted(self) -> tuple[str, ...]:
        """Every accepted answer as text."""
        answers = self.answer if isinstance(self.answer, (list, tuple)) else (self.answer,)
        return tuple(str(answer) for answer in (*answers, *self.aug_answers) if answer is not None)


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """A score, usually in [0, 1], and what a person may want to know about it."""

    score: float
    details: dict[str, Any] = field(default_factory=dict)


Scorer = Callable[[ScorerContext], Awaitable[float | ScoreResult]]


_scorers: Registry[Scorer] = Registry(
    "scorer",
    group="agentrl.scorers",
    built_in=(
        "agentrl.scoring.exact", "agentrl.scoring.f1", "agentrl.scoring.math", "agentrl.scoring.judge",
    ),
)  # fmt: skip


def scorer(*names: str) -> Callable[[Scorer], Scorer]:
    """Register an async function ``(ScorerContext) -> float | ScoreResult`` under ``names``."""
    return _scorers.register(*names)


def scorer_names() -> list[str]:
    """Every registered name, built in or from an entry point."""
    return _scorers.names()


def get_scorer(name: str) -> Scorer:
    """The scorer of a name or of a path ``module:function``; ConfigError if there is none."""
    return _scorers.get(name)


async def run_scorer(name: str, context: ScorerContext, timeout: float) -> ScoreResult:
    """Score one trajectory within ``timeout`` seconds; ``details.scorer`` of the result is ``name``.

    Its details are storable. What goes wrong is a ScorerError, never a score; the cancellation of this task
    passes, and so does a ConfigError: the scorer cannot work in this process.
    """

    async def call() -> ScoreResult:
        return _checked(name, await get_scorer(name)(context))

    try:
        async with asyncio.timeout(timeout):
            return await contain(call, f"scorer {name}", ScorerError)
    except TimeoutError as error:
        raise ScorerError(f"scorer {name} took longer than {timeout:g} s") from error
    except (ConfigError, ScorerError):
        raise
    except FailureError as error:
        raise ScorerError(f"scorer {name}: {error.message}", hint=error.hint) from error


def _checked(name: str, result: float | ScoreResult) -> ScoreResult:
    """The result with its details made storable; ScorerError where it is no score."""
    if not isinstance(result, ScoreResult):
        return ScoreResult(_number(name, result), {"scorer": name})
    details = storable(result.details)
    if not isinstance(details, dict):
        raise ScorerError(f"scorer {name} gave the details {describe(result.details)}, which are no mapping")
    return ScoreResult(_number(name, result.score), {**details, "scorer": name})


def _number(name: str, value: Any) -> float:
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ScorerError(f"scorer {name} returned {describe(value)}, which is no finite number")
