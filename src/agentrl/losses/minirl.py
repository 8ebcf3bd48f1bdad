"""MiniRL: importance-weighted REINFORCE that drops the tokens PPO would clip."""

from __future__ import annotations

import torch

from agentrl.losses.batch import TokenBatch, TokenLosses, bounded_exp
from agentrl.losses.settings import LossSettings


def minirl(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """−M·sg(r)·A·log πθ, float32[T] (arXiv 2512.01374); the factor w that makes r into πθ/μ follows.

    M is 0 where (A > 0 and r > 1+ε+ε_h) or (A < 0 and r < 1−ε), else 1. The weight w = π_old/μ is the
    importance correction's part (``losses.correction``): uncapped where no correction is asked for.
    """
    ratio = bounded_exp(batch.log_ratio.detach())
    advantages = batch.advantages
    dropped = ((advantages > 0) & (ratio > settings.upper)) | ((advantages < 0) & (ratio < settings.lower))
    losses = -ratio * advantages * batch.logprobs.float()
    return TokenLosses(
        losses=losses.masked_fill(dropped, 0.0),
        ratio=ratio,
        clipped=dropped,
        masked=torch.zeros_like(dropped),
    )
