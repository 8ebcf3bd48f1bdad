"""CISPO: REINFORCE whose importance weight, not whose gradient, is clipped."""

from __future__ import annotations

import torch

from agentrl.losses.batch import TokenBatch, TokenLosses, bounded_exp
from agentrl.losses.settings import LossSettings


def cispo(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """−sg(clip(r, 1−ε, 1+ε+ε_h))·A·log πθ, float32[T] (MiniMax-M1, arXiv 2506.13585)."""
    ratio = bounded_exp(batch.log_ratio.detach())
    weight = ratio.clamp(settings.lower, settings.upper)
    return TokenLosses(
        losses=-weight * batch.advantages * batch.logprobs.float(),
        ratio=ratio,
        clipped=weight != ratio,
        masked=torch.zeros_like(batch.mask),
    )
