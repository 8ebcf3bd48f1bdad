"""GRPO: the clipped surrogate, with an optional dual clip and optional gradient beyond the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.losses.batch import TokenBatch, TokenLosses, bounded_exp
from agentrl.losses.settings import LossSettings


def grpo(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """max(−r·A, −clip(r, 1−ε, 1+ε+ε_h)·A), float32[T].

    Sources: GRPO arXiv 2402.03300; the higher upper end is DAPO's, arXiv 2503.14476.
    """
    return clipped_surrogate(bounded_exp(batch.log_ratio), batch.advantages, settings)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> TokenLosses:
    """GRPO's form for any ratio [T] that carries the gradient.

    ``dual_clip`` c bounds the loss of a token with A < 0 by −c·A (arXiv 1912.09729).

    ``ce_grpo_beta_1`` (below the interval, A < 0) and ``ce_grpo_beta_2`` (above it, A > 0) give a clipped
    token the gradient β·bound·A·∇log πθ, bounded whatever its ratio is (CE-GPPO, arXiv 2509.20712). The loss
    keeps its clipped value; a β left out counts as 0, and β = 0 is GRPO.
    """
    clipped_ratio = ratio.clamp(settings.lower, settings.upper)
    unclipped, clipped = -ratio * advantages, -clipped_ratio * advantages
    losses = torch.maximum(unclipped, clipped)
    below = (ratio < settings.lower) & (advantages < 0)
    above = (ratio > settings.upper) & (advantages > 0)
    took = below | above
    if settings.keeps_gradient:
        beta = (settings.ce_grpo_beta_1 or 0.0) * below + (settings.ce_grpo_beta_2 or 0.0) * above
        straight_through = ratio / ratio.detach()
        losses = torch.where(took, clipped.detach() * (1 - beta + beta * straight_through), losses)
    if settings.dual_clip is not None:
        ceiling = -settings.dual_clip * advantages
        over = (advantages < 0) & (losses > ceiling)
        losses = torch.where(over, ceiling, losses)
        took = took | over
    return TokenLosses(
        losses=losses, ratio=ratio.detach(), clipped=took.detach(), masked=torch.zeros_like(took)
    )
