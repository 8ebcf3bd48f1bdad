"""Advantage estimators: the rewards of a group → advantages, chosen by ``--advantage``.

The built-in ones treat values within rounding error of the baseline as 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.documents.base import LARGEST_SCORE, is_finite, is_score, score_problem
from agentrl.errors import GroupError
from agentrl.registry import Registry
from agentrl.user_code import contain_call, describe

_NOISE_OF_RANGE = 1e-6
"""Advantages below this share of the group's range are 0."""

_NOISE_OF_SIZE = 1e-9
"""Rewards that differ by less than this share of the largest are equal."""

_STD_FLOOR = 1e-6

_LARGEST = 4 * LARGEST_SCORE
"""Largest size of an advantage; the built-in ones are at most the difference of two scores."""

_HINT = "return one finite number for each reward, in the same order"


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A function from the rewards of a group's trajectories to their advantages, in the same order."""

    function: Callable[[Sequence[float]], Sequence[float]]
    needs_others: bool = True
    """True if it compares trajectories: then a group of one trajectory is not trained."""

    def __call__(self, rewards: Sequence[float]) -> Sequence[float]:
        return self.function(rewards)


def _estimator(extension: Any) -> AdvantageEstimator:
    """Return a plain function as an estimator that compares trajectories."""
    if isinstance(extension, AdvantageEstimator):
        return extension
    if not callable(extension):
        raise TypeError(f"it is of type {type(extension).__name__}, not a function")
    return AdvantageEstimator(extension)


ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator", group="agentrl.advantages", flag="--advantage", convert=_estimator
)

BUILT_IN = frozenset({"leave_one_out", "grpo", "dr_grpo", "reward"})


def advantage(
    *names: str, needs_others: bool = True
) -> Callable[[Callable[[Sequence[float]], Sequence[float]]], AdvantageEstimator]:
    """Register a function ``(rewards of a group) -> advantages`` under ``names``.

    It is called with the rewards of the trajectories of a group that are trained, and returns one number for
    each, in the same order. With ``needs_others`` False it is also called with a single reward.
    """

    def decorate(function: Callable[[Sequence[float]], Sequence[float]]) -> AdvantageEstimator:
        estimator = AdvantageEstimator(function, needs_others)
        ESTIMATORS.add(estimator, *names)
        return estimator

    return decorate


@advantage("leave_one_out")
def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward less the mean of the others (RLOO, arXiv 2402.14740)."""
    total, others = sum(rewards), len(rewards) - 1
    return _without_noise([reward - (total - reward) / others for reward in rewards], rewards)


@advantage("grpo")
def grpo(rewards: Sequence[float]) -> list[float]:
    """Return each reward less the mean, over the standard deviation (arXiv 2402.03300)."""
    std = statistics.stdev(rewards)
    return [difference / (std + _STD_FLOOR) for difference in _centered(rewards)]


@advantage("dr_grpo")
def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Return each reward less the mean (arXiv 2503.20783)."""
    return _centered(rewards)


@advantage("reward", needs_others=False)
def reward(rewards: Sequence[float]) -> list[float]:
    """Return the rewards: REINFORCE, and with batch whitening REINFORCE++ (arXiv 2501.03262)."""
    return list(rewards)


def estimate(name: str, rewards: Sequence[float]) -> list[float]:
    """Return the advantages that the estimator ``name`` gives to ``rewards``, checked.

    Raises GroupError for a reward that is not a score, for an exception in the estimator and for a malformed
    result, and ConfigError for an estimator that does not exist or that this process may not import.
    """
    estimator = ESTIMATORS.get(name)
    if (wrong := next((value for value in rewards if not is_score(value)), None)) is not None:
        raise GroupError(
            f"a trajectory's reward {describe(wrong)} {score_problem(wrong)}",
            hint="score the group again by a scorer with smaller scores: agentrl db rescore",
        )
    what = f"advantage estimator {name}"
    values = contain_call(lambda: _checked(what, estimator(rewards)), what, GroupError)
    if len(values) != len(rewards):
        raise GroupError(f"{what} returned {len(values)} advantages for {len(rewards)} rewards", hint=_HINT)
    return values


def spread(rewards: Sequence[float]) -> float:
    """Return max − min of ``rewards``; 0 if they differ only by rounding."""
    width = max(rewards) - min(rewards)
    return width if width > _rounding(rewards) else 0.0


def agrees(scores: Sequence[float], min_spread: float) -> bool:
    """Return whether ``scores`` differ by less than ``min_spread``, up to rounding.

    Scores 0.2 and 0.3 differ by 0.1, although their difference as floats is smaller. At ``min_spread`` 0
    no scores agree, not even equal ones.
    """
    width = spread(scores)
    return min_spread > 0 if width == 0 else width < min_spread - _rounding(scores)


def _checked(what: str, values: Any) -> list[float]:
    """Return ``values`` as floats. Raises GroupError for anything but finite numbers."""
    checked = []
    for value in values:
        if not is_finite(value):
            raise GroupError(f"{what} returned {describe(value)}, which is not a finite number", hint=_HINT)
        if abs(value) > _LARGEST:
            raise GroupError(f"{what} returned {describe(value)}, which is beyond ±{_LARGEST:g}", hint=_HINT)
        checked.append(float(value))
    return checked


def _centered(rewards: Sequence[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return _without_noise([reward - mean for reward in rewards], rewards)


def _without_noise(differences: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """Return ``differences`` with those below 1e-6 of the range of ``rewards`` set to 0.0."""
    limit = max(_NOISE_OF_RANGE * spread(rewards), _rounding(rewards))
    return [value if abs(value) > limit else 0.0 for value in differences]


def _rounding(rewards: Sequence[float]) -> float:
    return _NOISE_OF_SIZE * max(map(abs, rewards))
