"""GSPO: GRPO's clipped surrogate on the length-normalized ratio of the whole trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.losses.built_in.grpo import check_gradient_is_kept, clipped_surrogate
from agentrl.losses.loss import TokenBatch, TokenLosses, bounded_exp, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


@loss(
    "GSPO", epsilon=3e-4, epsilon_higher=1e-4, reads_trajectory=True, follows_advantage=True,
    check=check_gradient_is_kept,
)  # fmt: skip
def gspo(
    batch: TokenBatch,
    settings: LossSettings,
    *,
    dual_clip: float,
    ce_grpo_beta_1: float | None,
    ce_grpo_beta_2: float | None,
) -> TokenLosses:
    """Return GRPO's loss of s = exp(Σ m·log r / Σ m) over the trajectory (GSPO-token, arXiv 2507.18071).

    The ratio of each token has the value s and the gradient s·∇log πθ of that token alone, so that tokens of
    one trajectory may have different advantages. The paper's bounds, 3e-4 and 4e-4, are of this ratio.
    """
    per_token = batch.logprobs.float() - batch.logprobs.detach().float()
    ratio = bounded_exp(per_token + batch.mean_log_ratio)
    return clipped_surrogate(ratio, batch.advantages, settings, dual_clip, ce_grpo_beta_1, ce_grpo_beta_2)
