"""SAPO: a sigmoid gate in place of a clip; it closes faster for negative advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from agentrl.config.flags import flag
from agentrl.losses.loss import TokenBatch, TokenLosses, bounded_exp, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


@loss("SAPO", clips=False, follows_advantage=True)
def sapo(
    batch: TokenBatch,
    settings: LossSettings,
    *,
    sapo_tau_pos: Annotated[float, flag(1.0, "temperature of the gate for A > 0", within="(0, inf)")],
    sapo_tau_neg: Annotated[float, flag(1.05, "temperature of the gate for A <= 0", within="(0, inf)")],
) -> TokenLosses:
    """Return −f(r)·A, float32[T], with f(r) = sigmoid(τ·(r − 1))·4/τ (arXiv 2511.20347).

    τ is ``sapo_tau_pos`` for A > 0, else ``sapo_tau_neg``. At r = 1 the gradient is that of GRPO, −A·∇log πθ;
    on both sides it decreases smoothly to 0, faster for a larger τ. Nothing is clipped.
    """
    ratio = bounded_exp(batch.log_ratio)
    tau = batch.advantages.new_full(batch.advantages.shape, sapo_tau_neg)
    tau = tau.masked_fill(batch.advantages > 0, sapo_tau_pos)
    losses = -(tau * (ratio - 1)).sigmoid() * (4 / tau) * batch.advantages
    return TokenLosses(losses=losses, ratio=ratio.detach())
