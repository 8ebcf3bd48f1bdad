"""MiniRL: importance-weighted REINFORCE that drops the tokens that PPO would clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.losses.loss import TokenBatch, TokenLosses, bounded_exp, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


@loss(
    "MINIRL",
    skip_length_normalization=True,
    strict_in_bound=True,
    epsilon_higher=0.1,
    contains_weight=True,
    follows_advantage=True,
)
def minirl(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """Return −M·sg(r)·A·log πθ, float32[T] (arXiv 2512.01374).

    M is 0 where (A > 0 and r > 1+ε+ε_h) or (A < 0 and r < 1−ε), else 1. ``losses.compute`` multiplies by
    w = π_old/μ, which turns r into πθ/μ; w is uncapped unless a correction caps it. The bounds are those of
    the original's scripts/minirl.sh.
    """
    ratio = bounded_exp(batch.log_ratio.detach())
    advantages = batch.advantages
    dropped = ((advantages > 0) & (ratio > settings.upper)) | ((advantages < 0) & (ratio < settings.lower))
    losses = -ratio * advantages * batch.logprobs.float()
    return TokenLosses(losses=losses.masked_fill(dropped, 0.0), ratio=ratio, clipped=dropped)
