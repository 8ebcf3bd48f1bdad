"""The loss of a critic: clipped squared errors of its values, and how well they explain the returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def value_losses(values: Tensor, start: Tensor, target: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return ½·max((V − R)², (clip(V, V_start − c, V_start + c) − R)²), float32[T], and bool[T], if clipped.

    ``values`` carry the gradient; ``start`` are those of the start of the step, ``target`` the returns R, all
    float32[T]. The loss is 0 where R is NaN. Source: the value clipping of OpenAI's baselines for PPO (arXiv
    1707.06347), as verl's ``compute_value_loss`` and TRL have it. It bounds how far the updates of a step
    move a value towards its return, as the policy's clip does.
    """
    import torch

    is_taught = ~target.isnan()
    # Replace NaN before the arithmetic: 0 times the gradient of NaN is NaN.
    target = torch.where(is_taught, target, values.detach())
    free = (values - target).square()
    bounded = (values.clamp(start - clip, start + clip) - target).square()
    losses = torch.where(is_taught, 0.5 * torch.maximum(free, bounded), 0.0)
    return losses, (bounded > free) & is_taught
