"""CrossEntropy: supervised fine-tuning on the trainable tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.losses.loss import TokenBatch, TokenLosses, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


@loss("CrossEntropy", token_level_loss=True, from_policy=False)
def cross_entropy(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """Return −log πθ, float32[T]. No policy sampled the tokens: the ratio is 1 and nothing is clipped."""
    return TokenLosses(losses=-batch.logprobs.float())
