"""Differences between the trainer's logprobs and an engine's, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from agentrl.observe.terminal import table

MEAN_LIMIT = 1e-3
"""The mean of |Δlogprob| must stay below this, in nats."""
BFLOAT16_LIMIT = 2e-2
"""The same for products in bfloat16, which trainer and engine round in different places."""


@dataclass(frozen=True)
class Difference:
    """|Δlogprob| between trainer and engine over all generated tokens, in nats."""

    engine: str
    executor: str
    tokens: int
    mean: float
    p99: float
    max: float
    limit: float = MEAN_LIMIT
    """What the mean must stay below."""

    @classmethod
    def of(
        cls, engine: str, executor: str, ours: NDArray[Any], theirs: NDArray[Any], limit: float = MEAN_LIMIT
    ) -> Difference:
        """Compare the logprobs of the same tokens, float[T] each."""
        delta = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
        p99 = float(np.quantile(delta, 0.99))
        return cls(engine, executor, len(delta), float(delta.mean()), p99, float(delta.max()), limit)

    @property
    def within(self) -> bool:
        """Whether the mean is below the limit; False for NaN."""
        return self.mean < self.limit


def render(differences: Sequence[Difference], model: str) -> RenderableType:
    """Return a table with a row per difference; there is one at least."""
    rows = [
        [
            item.engine, item.executor, item.tokens, f"{item.mean:.2e}", f"{item.p99:.2e}", f"{item.max:.2e}",
            "within" if item.within else "above",
        ]
        for item in differences
    ]  # fmt: skip
    columns = ["engine", "executor", "tokens", "mean", "p99", "max", f"mean < {differences[0].limit:g}"]
    return table(f"|Δlogprob| between trainer and engine, {model}", columns, rows, text=2)
