"""DPPO: importance-weighted policy gradient that drops tokens by the difference of their probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from agentrl.config.flags import flag
from agentrl.losses.loss import TokenBatch, TokenLosses, bounded_exp, loss

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.losses.settings import LossSettings


def moved_probability(batch: TokenBatch) -> Tensor:
    """Return πθ − μ of each token, float32[T], detached: how far its probability is from the sampler's."""
    return batch.logprobs.detach().float().exp() - batch.behavior_logprobs.float().exp()


@loss("DPPO", token_level_loss=True, compares_behavior=True)
def dppo(
    batch: TokenBatch,
    settings: LossSettings,
    *,
    dppo_kl_coef: Annotated[
        float, flag(0.0, "weight of (log πθ/μ)², which is added to the loss, e.g. 0.001", within="[0, inf)")
    ],
) -> TokenLosses:
    """Return −M·ρ·A + β·(log ρ)², float32[T], with ρ = πθ/μ and β ``dppo_kl_coef`` (arXiv 2602.04879).

    M is 0 where (A > 0 and πθ − μ > ε+ε_h) or (A < 0 and πθ − μ < −ε), else 1: the total variation of the
    token's probability (Binary-TV) is bounded, not its ratio, so that rare tokens are not dropped first.
    The term with β keeps its gradient where M is 0.
    """
    log_ratio = batch.log_ratio
    ratio = bounded_exp(log_ratio)
    moved = moved_probability(batch)
    advantages = batch.advantages
    dropped = ((advantages > 0) & (moved > settings.upper_width)) | (
        (advantages < 0) & (moved < -settings.lower_width)
    )
    losses = (-ratio * advantages).masked_fill(dropped, 0.0)
    if dppo_kl_coef:
        losses = losses + dppo_kl_coef * log_ratio.square()
    return TokenLosses(losses=losses, ratio=ratio.detach(), clipped=dropped)
