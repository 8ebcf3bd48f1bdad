"""One reduction over a whole optimizer step, of which every micro-batch holds a share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from agentrl.losses.settings import LossSettings


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a step's loss is divided by, counted before any bound or correction masks a token.

    ``tokens`` is Σ m, ``trajectories`` the number of trajectories with at least one token in the mask.
    Sums over micro-batches and ranks are those of the whole step; a part of a trajectory counts as the share
    of its tokens that it holds.
    """

    tokens: int
    trajectories: float

    @classmethod
    def of(cls, mask: Tensor, row: Tensor) -> Self:
        """Count one micro-batch: mask bool[T], row int64[T]."""
        return cls(int(mask.sum()), int(torch.unique(row[mask]).numel()))

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.tokens + other.tokens, self.trajectories + other.trajectories)


def reduce_losses(
    losses: Tensor,
    mask: Tensor,
    row: Tensor,
    trajectories: int,
    whole: Denominators,
    settings: LossSettings,
    lengths: Tensor | None = None,
) -> Tensor:
    """A micro-batch's share of the step's loss, a float32 scalar.

    The shares of all micro-batches add up to the loss of the step, and so do their gradients: with
    ``token_level_loss`` Σ m·loss / Σ m; without, the mean over trajectories of a trajectory's mean, of its
    sum with ``skip_length_normalization`` (which says nothing under ``token_level_loss``), or of its sum over
    ``loss_length_divisor`` where that is set (Dr. GRPO, arXiv 2503.20783).

    losses float32[T]; mask bool[T]; row int64[T] in [0, ``trajectories``). ``lengths`` [``trajectories``] are
    the masked-in tokens of the whole trajectories; without it, a trajectory is whole in its micro-batch.
    ``whole`` counts the step over all micro-batches and ranks.
    """
    weights = mask.to(losses.dtype)
    if settings.token_level_loss:
        weights = weights / max(whole.tokens, 1)
    else:
        if settings.loss_length_divisor is not None:
            weights = weights / settings.loss_length_divisor
        elif not settings.skip_length_normalization:
            if lengths is None:
                lengths = weights.new_zeros(trajectories).index_add(0, row, weights)
            weights = weights / lengths.to(weights.dtype).clamp(min=1.0)[row]
        weights = weights / (whole.trajectories or 1.0)
    return (losses * weights).sum()
