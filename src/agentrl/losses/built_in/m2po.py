"""M2PO: importance-weighted policy gradient whose second moment of log-ratios is bounded over an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from agentrl.config.flags import flag, require
from agentrl.losses.loss import TokenBatch, TokenLosses, bounded_exp, loss

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.losses.settings import LossSettings


def second_moments(batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Return (log πθ/μ)²/``m2_threshold``, float32[T]; 0 of tokens that did not move towards their advantage.

    These are the tokens that PPO may clip: A > 0 and πθ > μ, or A < 0 and πθ < μ.
    """
    import torch

    moved = batch.log_rho
    # Take the sign: the product of a tiny advantage and a tiny ratio is 0 in float32.
    is_active = batch.mask & (moved.sign() * batch.advantages.sign() > 0)
    return torch.where(is_active, moved.square() / settings.m2_threshold, 0.0)


def check_distillation(settings: LossSettings) -> None:
    """Raise ConfigError for a teacher: tokens are chosen before its part of the advantage is known."""
    require(
        not settings.distill_coef,
        "--loss_calculater M2PO chooses tokens by the sign of their advantage, to which --distill_coef"
        f" {settings.distill_coef} adds a teacher's judgement",
        "leave it out, or use another loss, e.g. IPO",
    )


@loss(
    "M2PO", token_level_loss=True, clips=False, compares_behavior=True, follows_advantage=True,
    bounds_mean_of=second_moments, check=check_distillation,
)  # fmt: skip
def m2po(
    batch: TokenBatch,
    settings: LossSettings,
    *,
    m2_threshold: Annotated[
        float, flag(0.04, "largest mean of (log πθ/μ)² over tokens that are trained", within="(0, inf)")
    ],
) -> TokenLosses:
    """Return −M·ρ·A, float32[T], with ρ = πθ/μ (arXiv 2510.01161, Algorithm 1).

    Of the tokens that have moved towards their advantage (A > 0 and ρ > 1, or A < 0 and ρ < 1), those with
    the largest (log ρ)² are dropped until the mean of the others' is at most ``m2_threshold``: M is 0 for
    them, and 1 for the rest. The tokens are those of the whole update. AReaL's m2po differs: it compares
    π_old with μ, for all tokens of a micro-batch.
    """
    ratio = bounded_exp(batch.log_ratio)
    moments = second_moments(batch, settings)
    dropped = moments > batch.limit_of_mean(moments)
    losses = (-ratio * batch.advantages).masked_fill(dropped, 0.0)
    return TokenLosses(losses=losses, ratio=ratio.detach(), clipped=dropped)
