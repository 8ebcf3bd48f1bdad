"""Advantage estimators of a group; values within rounding error of the baseline are 0."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

_NOISE_OF_RANGE = 1e-6
"""Advantages below this share of the group's range are 0."""

_NOISE_OF_SIZE = 1e-9
"""Rewards that differ by less than this share of the largest are equal."""

_STD_FLOOR = 1e-6


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


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Reward less the mean of the others (RLOO, arXiv 2402.14740)."""
    total, others = sum(rewards), len(rewards) - 1
    return _without_noise([reward - (total - reward) / others for reward in rewards], rewards)


def _grpo(rewards: Sequence[float]) -> list[float]:
    """Reward less the mean, over the standard deviation (arXiv 2402.03300)."""
    std = statistics.stdev(rewards)
    return [difference / (std + _STD_FLOOR) for difference in _dr_grpo(rewards)]


def _dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Reward less the mean (arXiv 2503.20783)."""
    mean = statistics.fmean(rewards)
    return _without_noise([reward - mean for reward in rewards], rewards)


def _reward(rewards: Sequence[float]) -> list[float]:
    """The reward itself: REINFORCE, and with batch whitening REINFORCE++ (arXiv 2501.03262)."""
    return list(rewards)


ESTIMATORS: Mapping[str, Callable[[Sequence[float]], list[float]]] = {
    "leave_one_out": _leave_one_out,
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "reward": _reward,
}
"""``--advantage`` → the rewards of a group's trajectories to their advantages.

Those that compare need two rewards or more (``needs_others``).
"""


def needs_others(advantage: str) -> bool:
    """Return whether an estimator compares a trajectory with others of its group."""
    return advantage != "reward"


def _without_noise(differences: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """Return ``differences`` with those below 1e-6 of the range of ``rewards`` set to 0.0."""
    limit = max(_NOISE_OF_RANGE * spread(rewards), _rounding(rewards))
    return [value if abs(value) > limit else 0.0 for value in differences]


def _rounding(rewards: Sequence[float]) -> float:
    return _NOISE_OF_SIZE * max(map(abs, rewards))
