"""The pull towards a reference model: a KL estimate per token, added to the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.losses.batch import LOG_RATIO_LIMIT, TokenBatch


def reference_kl(batch: TokenBatch, estimator: str) -> Tensor:
    """An estimate of KL(πθ‖π_ref) in nats from each sampled token, float32[T], with gradient.

    ``k3``: π_ref/πθ − 1 − log π_ref/πθ, never negative, with the gradient of that expression (GRPO,
    arXiv 2402.03300). ``k1``: log πθ/π_ref, whose own gradient would vanish on average; it has that of the
    divergence instead, log πθ/π_ref · ∇log πθ, as if it were subtracted from the reward (arXiv 2510.01555).
    Raises ValueError for a batch without reference logprobs.
    """
    if batch.reference_logprobs is None:
        raise ValueError("the batch has no reference logprobs")
    logprobs = batch.logprobs.float()
    log_ratio = (logprobs - batch.reference_logprobs.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k3":
        return torch.exp(-log_ratio) - 1 + log_ratio
    value = log_ratio.detach()
    return value + value * (logprobs - logprobs.detach())
