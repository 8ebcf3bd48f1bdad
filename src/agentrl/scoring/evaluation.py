"""Compute the numbers of an evaluation, with intervals over its tasks; estimate how hard a task is.

A trajectory passes with probability σ(ability + ease) (Rasch, 1960). ``ability`` belongs to the policy, in
logits, and changes as it learns. ``ease`` belongs to the task, is 0 for mean difficulty, and hardly changes.
So an old pass rate of a task still predicts the next one.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

ABILITY_VARIANCE = 4.0
"""Variance of the normal prior of the ability, whose mean is a pass rate of ½."""

EASE_VARIANCE = 1.0
"""Variance of the normal prior of an ease, whose mean is the previous estimate."""

LIMIT = 8.0
"""Largest absolute value of ability and ease, in logits."""

FIRST_WEIGHT = 4.0
"""Weight of the model's prediction, in groups."""

_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class Trials:
    """The trajectories of one group: how many have a score, how many passed, and the ease of their task."""

    scored: int
    passed: float
    ease: float = 0.0


def pass_probability(ability: float, ease: float) -> float:
    """Return the expected pass rate of a task."""
    return 1 / (1 + math.exp(-(ability + ease)))


def spread_probability(rate: float, generations: int) -> float:
    """Return the probability that a group has both passes and failures: 1 − p^n − (1−p)^n."""
    return float(1 - rate**generations - (1 - rate) ** generations)


def first_spread_probability(first: Sequence[Trials], ability: float, generations: int) -> float:
    """Return the probability that a new task's group has spread, estimated from ``first``.

    ``first`` are the first groups of other tasks. Their fraction with spread is shrunk towards the value of a
    task of mean difficulty, which is wrong if most tasks are easy and the others impossible.
    """
    expected = spread_probability(pass_probability(ability, 0.0), generations)
    had = sum(0 < group.passed < group.scored for group in first)
    return (had + FIRST_WEIGHT * expected) / (len(first) + FIRST_WEIGHT)


def estimate_ability(groups: Sequence[Trials]) -> float:
    """Return the maximum a posteriori ability, in logits; 0 without groups."""

    def slope(ability: float) -> float:
        surprise = sum(g.passed - g.scored * pass_probability(ability, g.ease) for g in groups)
        return surprise - ability / ABILITY_VARIANCE

    return _root(slope)


def update_ease(group: Trials, ability: float) -> float:
    """Return the ease of a task after one more group; ``group.ease`` is the previous estimate."""

    def slope(ease: float) -> float:
        surprise = group.passed - group.scored * pass_probability(ability, ease)
        return surprise - (ease - group.ease) / EASE_VARIANCE

    return _root(slope)


def _root(slope: Callable[[float], float]) -> float:
    """Return the root of a decreasing function within ± ``LIMIT``, by bisection."""
    low, high = -LIMIT, LIMIT
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if slope(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


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
        return {**asdict(self), "pass_at": {str(k): asdict(value) for k, value in self.pass_at.items()}}


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
    by_kind: dict[str, dict[str, Summary]] = {}
    for kind, of_tasks in names.items():
        groups: dict[str, list[EvaluatedTask]] = defaultdict(list)
        for task, its_names in zip(tasks, of_tasks, strict=True):
            for name in dict.fromkeys(its_names):
                groups[name].append(task)
        if any(len(members) < len(tasks) for members in groups.values()):
            by_kind[kind] = {name: summarize(groups[name], prices) for name in sorted(groups)}
    return by_kind


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
        Estimate(value=float(value), low=float(low[index]), high=float(high[index]))
        for index, value in enumerate(values.mean(axis=0))
    ]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.fmean(known) if known else None


def _powers(limit: int) -> list[int]:
    """Return 1, 2, 4, … up to ``limit``, and ``limit`` itself."""
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
    return sorted({*powers, limit}) if limit else []


PAIRED_ROUNDS = 10_000
"""Resamples of the paired bootstrap, and sign flips of the permutation test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean of B − A over tasks, its 95 % interval by the paired bootstrap, and two p-values."""

    a: float
    b: float
    effect: Estimate
    p_permutation: float
    """Two-sided p-value of the sign-flip permutation test of the mean difference."""
    better: int
    """Tasks on which B is above A."""
    worse: int
    p_sign: float
    """Two-sided p-value of the exact sign test on ``better`` and ``worse``; ties are left out.

    With one trajectory per task, on passes, this is McNemar's exact test.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """B compared with A over the tasks that both scored."""

    tasks: int
    only_a: int
    """Scored tasks that B lacks, or has with another content or without a score."""
    only_b: int
    score: Difference
    passed: Difference


def compare_tasks(a: Sequence[EvaluatedTask], b: Sequence[EvaluatedTask]) -> Comparison | None:
    """Compare B with A; None if they have no scored task with the same id and content in common."""
    of_a, of_b = _scored(a), _scored(b)
    common = sorted(of_a.keys() & of_b.keys())
    if not common:
        return None
    pairs = [(of_a[key], of_b[key]) for key in common]
    return Comparison(
        tasks=len(common),
        only_a=len(of_a) - len(common),
        only_b=len(of_b) - len(common),
        score=difference([(statistics.fmean(x.scores), statistics.fmean(y.scores)) for x, y in pairs]),
        passed=difference([(x.passes / len(x.scores), y.passes / len(y.scores)) for x, y in pairs]),
    )


def difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Return the difference of paired means; ``pairs`` has (A, B) of each task."""
    values = np.asarray(pairs, dtype=float)
    deltas = values[:, 1] - values[:, 0]
    mean = float(deltas.mean())
    generator = np.random.default_rng(_SEED)
    resampled, flipped = np.empty(PAIRED_ROUNDS), np.empty(PAIRED_ROUNDS)
    for number in range(PAIRED_ROUNDS):
        resampled[number] = deltas[generator.integers(0, len(deltas), len(deltas))].mean()
        flipped[number] = (deltas * generator.choice((-1.0, 1.0), len(deltas))).mean()
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    extreme = int((np.abs(flipped) >= abs(mean) - 1e-12).sum())
    better, worse = int((deltas > 0).sum()), int((deltas < 0).sum())
    return Difference(
        a=float(values[:, 0].mean()),
        b=float(values[:, 1].mean()),
        effect=Estimate(value=mean, low=float(low), high=float(high)),
        p_permutation=(extreme + 1) / (PAIRED_ROUNDS + 1),
        better=better,
        worse=worse,
        p_sign=sign_test(better, worse),
    )


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p-value of the exact sign test: a fair coin, ``better`` heads, ``worse`` tails."""
    flips = better + worse
    tail = sum(math.comb(flips, heads) for heads in range(min(better, worse) + 1))
    return float(min(1.0, 2 * tail / 2**flips))


def _scored(tasks: Sequence[EvaluatedTask]) -> Mapping[tuple[str, str], EvaluatedTask]:
    return {(task.task_id, task.digest): task for task in tasks if task.scores}
