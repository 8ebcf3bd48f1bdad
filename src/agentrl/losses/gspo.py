"""GSPO: GRPO's clipped surrogate on the length-normalized ratio of the whole trajectory."""

from __future__ import annotations

from agentrl.losses.batch import TokenBatch, TokenLosses, bounded_exp
from agentrl.losses.grpo import clipped_surrogate
from agentrl.losses.settings import LossSettings


def gspo(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """GRPO's form with s = exp(Σ m·log r / Σ m) over the trajectory (GSPO-token, arXiv 2507.18071).

    Each token's ratio is s in value, while its gradient is s·∇log πθ of that token alone, so that tokens of
    one trajectory may have advantages of their own.
    """
    per_token = batch.logprobs.float() - batch.logprobs.detach().float()
    return clipped_surrogate(bounded_exp(per_token + batch.mean_log_ratio), batch.advantages, settings)
