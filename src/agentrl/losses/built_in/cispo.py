"""CISPO: REINFORCE with a clipped importance weight; no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.losses.loss import TokenBatch, TokenLosses, bounded_exp, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


@loss("CISPO", token_level_loss=True, epsilon=1.0, epsilon_higher=3.0, follows_advantage=True)
def cispo(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """Return −sg(clip(r, 1−ε, 1+ε+ε_h))·A·log πθ, float32[T] (MiniMax-M1, arXiv 2506.13585).

    The paper's weight lies in [0, 1 + 4].
    """
    ratio = bounded_exp(batch.log_ratio.detach())
    weight = ratio.clamp(settings.lower, settings.upper)
    return TokenLosses(
        losses=-weight * batch.advantages * batch.logprobs.float(), ratio=ratio, clipped=weight != ratio
    )
