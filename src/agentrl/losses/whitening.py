"""Advantages whitened over tokens (REINFORCE++)."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-8
"""Added to the standard deviation."""

_NOISE = 1e-9
"""A standard deviation below this share of the largest advantage is rounding."""


def whitened(advantages: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return A' = (A − mean) / (std + 1e-8), in float64; ``advantages[i]`` stands for ``tokens[i]`` tokens.

    Mean and standard deviation are over all n tokens: REINFORCE++ (arXiv 2501.03262). The variance is the
    population's, as in OpenRLHF; verl divides by n − 1 instead of n. The sums are exact and do not depend on
    the order. Equal advantages become 0; without a token they stay as they are.
    """
    total = sum(tokens)
    if total == 0:
        return list(advantages)
    mean = math.fsum(value * count for value, count in zip(advantages, tokens, strict=True)) / total
    centered = [value - mean for value in advantages]
    squares = (value**2 * count for value, count in zip(centered, tokens, strict=True))
    deviation = math.sqrt(math.fsum(squares) / total)
    if deviation <= _NOISE * max(map(abs, advantages)):
        return [0.0] * len(centered)
    return [value / (deviation + EPSILON) for value in centered]
