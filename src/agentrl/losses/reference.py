"""The pull towards a reference model: a KL estimate per token, added to the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.losses.batch import LOG_RATIO_LIMIT, TokenBatch, bounded_exp

WEIGHT_CAP = 10.0
"""Cap of ρ = πθ/μ in ``weighted_k3``: it bounds the variance and biases tokens above it."""


def reference_kl(batch: TokenBatch, estimator: str) -> Tensor:
    """Return a KL estimate per token in nats, float32[T], with gradient. Below, d = log πθ/π_ref.

    ``weighted_k3``: ρ·(e^−d − 1 + d), ρ = πθ/μ capped at ``WEIGHT_CAP``, with the gradient through ρ, which
    is ρ·d·∇log πθ: under μ, its expectation is the gradient of KL(πθ‖π_ref) (DeepSeek-V3.2, arXiv
    2512.02556). The others take no μ into account, and hold for tokens that πθ sampled:
    ``k3``: e^−d − 1 + d, never negative (GRPO, arXiv 2402.03300). Its value estimates KL(πθ‖π_ref), its
    gradient is that of KL(π_ref‖πθ).
    ``k2``: d²/2, with the gradient of KL(πθ‖π_ref) (arXiv 2510.01555).
    ``k1``: d, whose own gradient would vanish on average; it has k2's, d·∇log πθ, as if it were subtracted
    from the reward.
    Raises ValueError for a batch without reference logprobs.
    """
    if batch.reference_logprobs is None:
        raise ValueError("the batch has no reference logprobs")
    logprobs = batch.logprobs.float()
    log_ratio = (logprobs - batch.reference_logprobs.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k1":
        value = log_ratio.detach()
        return value + value * (logprobs - logprobs.detach())
    k3 = torch.exp(-log_ratio) - 1 + log_ratio
    if estimator == "k3":
        return k3
    weight = bounded_exp(batch.log_rho).clamp(max=WEIGHT_CAP)
    return weight * torch.exp(logprobs - logprobs.detach()) * k3
