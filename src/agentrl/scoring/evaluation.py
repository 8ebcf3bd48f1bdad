"""Compute the numbers of an evaluation: mean score, pass@k, and bootstrap intervals over its tasks."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROUNDS = 2000
"""Resamples of a bootstrap."""
LEVEL = 0.95
"""Coverage of an interval."""
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedTask:
    """The trajectories of one task. Those that failed have no score, and count in no mean of scores."""

    task_id: str
    digest: str
    """Hash of the task's content."""
    scorer: str
    agent: str
    environment: str | None = None
    tags: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    failed: int = 0
    failures: tuple[str, ...] = ()
    """Kind of each failed attempt."""
    turns: tuple[int, ...] = ()
    """Model calls of each scored trajectory."""
    input_tokens: int = 0
    """Tokens of the prompts of all model calls, failed attempts included; so are the two below."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: tuple[float, ...] = ()
    """Duration of each scored trajectory."""
    right_threshold: float = 0.5
    """A trajectory passes when its score is above this."""

    @property
    def passes(self) -> int:
        """Return how many trajectories passed."""
        return sum(score > self.right_threshold for score in self.scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks with its 95 % interval; the interval of a single task is that mean itself."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return the three numbers by name."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of some tasks. Means are over tasks, which all count the same; None if nothing is scored.

    ``pass_at[1]`` is the pass rate: avg@k of passes. ``score`` is avg@k of scores.
    """

    tasks: int
    scored: int
    failed: int
    score: Estimate | None = None
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    turns: float | None = None
    seconds: float | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cost: float | None = None
    """In the currency of the prices; None without prices."""

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON."""
        return {
            "tasks": self.tasks,
            "scored": self.scored,
            "failed": self.failed,
            "score": None if self.score is None else self.score.to_json(),
            "pass_at": {str(k): value.to_json() for k, value in self.pass_at.items()},
            "turns": self.turns,
            "seconds": self.seconds,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "cost": self.cost,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Price of a million tokens. A prompt token costs the same whether it was cached or not."""

    input: float = 0.0
    output: float = 0.0

    def cost(self, input_tokens: int, generated_tokens: int) -> float | None:
        """Return the cost of some tokens; None if both prices are 0."""
        if not self.input and not self.output:
            return None
        return (input_tokens * self.input + generated_tokens * self.output) / 1e6


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from ``passes`` of ``samples`` (arXiv:2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)


def summarize(tasks: Sequence[EvaluatedTask], prices: Prices | None = None) -> Summary:
    """Return the numbers of ``tasks``. pass@k is for each k of which every scored task has enough samples."""
    scored = [task for task in tasks if task.scores]
    largest = min((len(task.scores) for task in scored), default=0)
    columns = {k: [pass_at_k(len(t.scores), t.passes, k) for t in scored] for k in _powers(largest)}
    means = estimates([[statistics.fmean(task.scores) for task in scored], *columns.values()])
    used = {
        name: sum(getattr(task, name) for task in tasks)
        for name in ("input_tokens", "cached_tokens", "generated_tokens")
    }
    return Summary(
        tasks=len(tasks),
        scored=sum(len(task.scores) for task in scored),
        failed=sum(task.failed for task in tasks),
        score=means[0],
        pass_at={k: value for k, value in zip(columns, means[1:], strict=True) if value is not None},
        turns=_mean(turns for task in scored for turns in task.turns),
        seconds=_mean(seconds for task in scored for seconds in task.seconds),
        cost=(prices or Prices()).cost(used["input_tokens"], used["generated_tokens"]),
        **used,
    )


def summarize_groups(
    tasks: Sequence[EvaluatedTask], prices: Prices | None = None
) -> dict[str, dict[str, Summary]]:
    """Return kind of group → name → numbers: by environment, tag, scorer and agent.

    A kind is left out if all tasks have the same name, or none. A task counts in each of its tags.
    """
    names: dict[str, list[tuple[str, ...]]] = {
        "environment": [(task.environment,) if task.environment else () for task in tasks],
        "tag": [task.tags for task in tasks],
        "scorer": [(task.scorer,) for task in tasks],
        "agent": [(task.agent,) for task in tasks],
    }
    found: dict[str, dict[str, Summary]] = {}
    for kind, of_tasks in names.items():
        groups: dict[str, list[EvaluatedTask]] = defaultdict(list)
        for task, its_names in zip(tasks, of_tasks, strict=True):
            for name in dict.fromkeys(its_names):
                groups[name].append(task)
        if any(len(members) < len(tasks) for members in groups.values()):
            found[kind] = {name: summarize(groups[name], prices) for name in sorted(groups)}
    return found


def count_failures(tasks: Sequence[EvaluatedTask]) -> dict[str, int]:
    """Return kind of failure → number of attempts, the most common first."""
    return dict(Counter(kind for task in tasks for kind in task.failures).most_common())


def estimates(columns: Sequence[Sequence[float]]) -> list[Estimate | None]:
    """Return the mean of each column with its interval; None for empty columns.

    Percentile bootstrap: each round draws as many rows as there are, with replacement. A row is a task, so
    the samples of one task, which depend on each other, stay together. The draws are the same every time.
    """
    values = np.asarray(columns, dtype=float).T
    if values.size == 0:
        return [None] * len(columns)
    rows = len(values)
    generator = np.random.default_rng(_SEED)
    means = np.empty((ROUNDS, len(columns)))
    for number in range(ROUNDS):
        means[number] = values[generator.integers(0, rows, rows)].mean(axis=0)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return [
        Estimate(value=float(value), low=float(low[place]), high=float(high[place]))
        for place, value in enumerate(values.mean(axis=0))
    ]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.fmean(known) if known else None


def _powers(limit: int) -> list[int]:
    """Return 1, 2, 4, … up to ``limit``, and ``limit`` itself."""
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
    return sorted({*powers, limit}) if limit else []
