"""CrossEntropy: supervised fine-tuning on the trainable tokens."""

from __future__ import annotations

import torch

from agentrl.losses.batch import TokenBatch, TokenLosses
from agentrl.losses.settings import LossSettings


def cross_entropy(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """−log πθ, float32[T]. There is no sampling policy: the ratio is 1 and nothing is clipped."""
    nothing = torch.zeros_like(batch.mask)
    return TokenLosses(
        losses=-batch.logprobs.float(),
        ratio=torch.ones_like(batch.logprobs, dtype=torch.float32),
        clipped=nothing,
        masked=nothing,
    )
