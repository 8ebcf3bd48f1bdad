"""GRPO: the clipped surrogate, with an optional dual clip and optional gradient beyond the clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from agentrl.config.flags import flag, require
from agentrl.losses.loss import TokenBatch, TokenLosses, bounded_exp, loss

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.losses.settings import LossSettings


def check_gradient_is_kept(settings: LossSettings) -> None:
    """Raise ConfigError if strict bounds drop the tokens whose gradient the two β keep."""
    keeps = settings.ce_grpo_beta_1 is not None or settings.ce_grpo_beta_2 is not None
    require(
        not (keeps and settings.strict_in_bound),
        f"--strict_in_bound is {settings.strict_in_bound}: it drops the tokens whose gradient"
        " --ce_grpo_beta_1 and --ce_grpo_beta_2 keep",
        "turn it off, or leave those two out",
    )


@loss("GRPO", follows_advantage=True, check=check_gradient_is_kept)
def grpo(
    batch: TokenBatch,
    settings: LossSettings,
    *,
    dual_clip: Annotated[
        float,
        flag(
            None,
            "for A < 0, bound the loss of a token by -dual_clip·A; inf: no bound (default: 3)",
            within="(1, inf]",
        ),
    ] = 3.0,
    ce_grpo_beta_1: Annotated[
        float | None, flag(None, "share of the gradient kept below the clip interval", within="[0, inf)")
    ] = None,
    ce_grpo_beta_2: Annotated[
        float | None, flag(None, "share of the gradient kept above the clip interval", within="[0, inf)")
    ] = None,
) -> TokenLosses:
    """Return max(−r·A, −clip(r, 1−ε, 1+ε+ε_h)·A), float32[T]; for the parameters see ``clipped_surrogate``.

    Sources: GRPO, arXiv 2402.03300; the higher upper end is from DAPO, arXiv 2503.14476.
    """
    ratio = bounded_exp(batch.log_ratio)
    return clipped_surrogate(ratio, batch.advantages, settings, dual_clip, ce_grpo_beta_1, ce_grpo_beta_2)


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    dual_clip: float,
    ce_grpo_beta_1: float | None,
    ce_grpo_beta_2: float | None,
) -> TokenLosses:
    """Return GRPO's loss for any ratio [T] that carries the gradient.

    ``dual_clip`` c bounds the loss of a token with A < 0 by −c·A (arXiv 1912.09729).

    ``ce_grpo_beta_1`` (below the interval, A < 0) and ``ce_grpo_beta_2`` (above it, A > 0) give a clipped
    token the gradient β·bound·A·∇log πθ, which is bounded for every ratio (CE-GPPO, arXiv 2509.20712). The
    loss keeps its clipped value. A β that is None counts as 0, and β = 0 is GRPO.
    """
    clipped_ratio = ratio.clamp(settings.lower, settings.upper)
    unclipped, clipped = -ratio * advantages, -clipped_ratio * advantages
    # Mind ties, at which maximum halves the gradient: within the interval both halves are −A·∇r.
    losses = unclipped.maximum(clipped)
    below = (ratio < settings.lower) & (advantages < 0)
    above = (ratio > settings.upper) & (advantages > 0)
    is_clipped = below | above
    if ce_grpo_beta_1 is not None or ce_grpo_beta_2 is not None:
        beta = (ce_grpo_beta_1 or 0.0) * below + (ce_grpo_beta_2 or 0.0) * above
        # Divide it by itself: the value is 1, and the gradient that of log πθ at any ratio.
        straight_through = ratio / ratio.detach()
        losses = (clipped.detach() * (1 - beta + beta * straight_through)).where(is_clipped, losses)
    ceiling = -dual_clip * advantages
    over = (advantages < 0) & (losses > ceiling)
    losses = ceiling.where(over, losses)
    return TokenLosses(losses=losses, ratio=ratio.detach(), clipped=(is_clipped | over).detach())
