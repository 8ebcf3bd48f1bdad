"""A loss of your own: Dr. GRPO (arXiv 2503.20783), a clipped surrogate without any normalization.

Every trajectory counts with the sum of its tokens, and advantages are not divided by the standard deviation.
Name it on the trainer; the folder must be on PYTHONPATH::

    agentrl train --run_name my_run --loss_calculater custom_loss:dr_grpo --loss_args '{"clip": 0.3}' …
    agentrl sample --run_name my_run --advantage dr_grpo …
"""

import torch

from agentrl import LossSettings, TokenBatch, TokenLosses, loss


@loss("DrGRPO", token_level_loss=False, skip_length_normalization=True)
def dr_grpo(batch: TokenBatch, settings: LossSettings, *, clip: float = 0.2) -> TokenLosses:
    """Return max(−r·A, −clip(r, 1−clip, 1+clip)·A), float32[T]."""
    ratio = torch.exp(batch.log_ratio)
    bounded = ratio.clamp(1 - clip, 1 + clip)
    losses = torch.maximum(-ratio * batch.advantages, -bounded * batch.advantages)
    return TokenLosses(losses=losses, ratio=ratio.detach())
