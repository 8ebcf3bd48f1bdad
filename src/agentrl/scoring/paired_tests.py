"""Compare two evaluations over the tasks that both have sampled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.scoring.evaluation import LEVEL, Estimate, EvaluatedTask

ROUNDS = 10_000
"""Resamples of the paired bootstrap, and sign flips of the permutation test."""
_SEED = 0


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

    def to_json(self) -> dict[str, float | int | dict[str, float]]:
        """Return the numbers by name."""
        return {
            "a": self.a, "b": self.b, "effect": self.effect.to_json(), "p_permutation": self.p_permutation,
            "better": self.better, "worse": self.worse, "p_sign": self.p_sign,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """B compared with A over the tasks that both scored."""

    tasks: int
    only_a: int
    """Scored tasks that B lacks, or has with another content or without a score."""
    only_b: int
    score: Difference
    passed: Difference


def compare(a: Sequence[EvaluatedTask], b: Sequence[EvaluatedTask]) -> Comparison | None:
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
    resampled, flipped = np.empty(ROUNDS), np.empty(ROUNDS)
    for number in range(ROUNDS):
        resampled[number] = deltas[generator.integers(0, len(deltas), len(deltas))].mean()
        flipped[number] = (deltas * generator.choice((-1.0, 1.0), len(deltas))).mean()
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    extreme = int((np.abs(flipped) >= abs(mean) - 1e-12).sum())
    better, worse = int((deltas > 0).sum()), int((deltas < 0).sum())
    return Difference(
        a=float(values[:, 0].mean()),
        b=float(values[:, 1].mean()),
        effect=Estimate(value=mean, low=float(low), high=float(high)),
        p_permutation=(extreme + 1) / (ROUNDS + 1),
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
