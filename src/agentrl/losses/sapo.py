"""SAPO: a sigmoid gate in place of a clip; it closes faster for negative advantages."""

from __future__ import annotations

import torch

from agentrl.losses.batch import TokenBatch, TokenLosses, bounded_exp
from agentrl.losses.registry import loss
from agentrl.losses.settings import LossSettings


@loss("SAPO", clips=False)
def sapo(
    batch: TokenBatch, settings: LossSettings, *, sapo_tau_pos: float, sapo_tau_neg: float
) -> TokenLosses:
    """Return −f(r)·A, float32[T], with f(r) = sigmoid(τ·(r − 1))·4/τ (arXiv 2511.20347).

    τ is ``sapo_tau_pos`` for A > 0, else ``sapo_tau_neg``. At r = 1 the gradient is that of GRPO, −A·∇log πθ;
    on both sides it decreases smoothly to 0, faster for a larger τ. Nothing is clipped.
    """
    ratio = bounded_exp(batch.log_ratio)
    tau = torch.where(batch.advantages > 0, sapo_tau_pos, sapo_tau_neg)
    return TokenLosses(
        losses=-torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * batch.advantages, ratio=ratio.detach()
    )
