"""IPO: importance-weighted policy gradient without the tokens whose probability moved too far, either way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.losses.built_in.dppo import moved_probability
from agentrl.losses.loss import TokenBatch, TokenLosses, bounded_exp, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


@loss("IPO", token_level_loss=True, epsilon=0.3, compares_behavior=True, follows_advantage=True)
def ipo(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """Return −M·ρ·A, float32[T], with ρ = πθ/μ (INTELLECT Policy Optimization, the default of prime-rl).

    M is 0 where πθ − μ > ε+ε_h or πθ − μ < −ε, else 1. DPPO keeps a token that moved far against its
    advantage, because the gradient leads back; IPO drops it too: trainer and sampler disagree about it.
    Source: prime-rl, docs/ipo.md and pull request 3586 (ε 0.3, no KL).
    """
    ratio = bounded_exp(batch.log_ratio)
    moved = moved_probability(batch)
    dropped = (moved > settings.upper_width) | (moved < -settings.lower_width)
    losses = (-ratio * batch.advantages).masked_fill(dropped, 0.0)
    return TokenLosses(losses=losses, ratio=ratio.detach(), clipped=dropped)
