"""Estimate how hard a task is for the policy from pass rates, by a Rasch model.

A trajectory passes with probability σ(ability + ease) (Rasch, 1960). ``ability`` belongs to the policy, in
logits, and changes as it learns. ``ease`` belongs to the task, is 0 for mean difficulty, and hardly changes.
So an old pass rate of a task still predicts the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
