"""SAPO: a sigmoid gate in place of a clip; it closes faster for negative advantages."""

from __future__ import annotations

import torch

from agentrl.losses.batch import TokenBatch, TokenLosses, bounded_exp
from agentrl.losses.settings import LossSettings


def sapo(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """−f(r)·A, float32[T], with f(r) = sigmoid(τ·(r − 1))·4/τ (arXiv 2511.20347).

    τ is ``sapo_tau_pos`` for A > 0, else ``sapo_tau_neg``. At r = 1 the gradient is that of GRPO, −A·∇log πθ;
    on both sides it vanishes smoothly, the sooner the larger τ is. Nothing is clipped.
    """
    ratio = bounded_exp(batch.log_ratio)
    tau = torch.where(batch.advantages > 0, settings.sapo_tau_pos, settings.sapo_tau_neg)
    nothing = torch.zeros_like(batch.mask)
    return TokenLosses(
        losses=-torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * batch.advantages,
        ratio=ratio.detach(),
        clipped=nothing,
        masked=nothing,
    )
