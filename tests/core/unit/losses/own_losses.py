"""A user's own losses."""

from agentrl.losses.loss import TokenBatch, TokenLosses, loss
from agentrl.losses.settings import LossSettings


@loss(token_level_loss=True, importance_weight_cap_ratio=4.0)
def soft(batch: TokenBatch, settings: LossSettings, *, beta: float = 0.1, power: int) -> TokenLosses:
    return TokenLosses(losses=-beta * batch.advantages**power * batch.logprobs)


@loss()
def clipped(batch, settings, *, dual_clip, scale=None):
    return TokenLosses(losses=batch.logprobs * (dual_clip or 1.0))


def plain(batch, settings):
    return TokenLosses(losses=-batch.logprobs)


number = 3
