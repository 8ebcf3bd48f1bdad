"""Importance corrections for μ ≠ π_old, and bounds for tokens that went stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.losses.batch import TokenBatch, bounded_exp
from agentrl.losses.correction_spec import Correction
from agentrl.losses.settings import LossSettings


@dataclass(frozen=True, slots=True)
class Weighting:
    """What the corrections make of a micro-batch: a factor float32[T] ≥ 0, and tokens to drop, bool[T]."""

    weight: Tensor
    masked: Tensor


def weigh(batch: TokenBatch, corrections: tuple[Correction, ...], *, weighted_by_default: bool) -> Weighting:
    """Apply the corrections to a micro-batch; their order does not matter, every bound looks at w itself.

    ``weighted_by_default`` is for a loss that contains w (MINIRL): without ``tis`` or ``icepop`` its factor
    is w uncapped. The factor of any other loss is then 1.
    """
    raw = bounded_exp(batch.log_weight)
    names = {correction.name for correction in corrections}
    weight = raw if weighted_by_default or names & {"tis", "icepop"} else torch.ones_like(raw)
    masked = torch.zeros_like(batch.mask)
    for correction in corrections:
        if correction.name == "tis":
            weight = weight.clamp(max=correction.high)
        else:
            masked = masked | _MASKS[correction.name](batch, raw, correction)
    return Weighting(weight, masked)


def _token_outside(batch: TokenBatch, raw: Tensor, correction: Correction) -> Tensor:
    return (raw < correction.low) | (raw > correction.high)


def _trajectory_outside(batch: TokenBatch, raw: Tensor, correction: Correction) -> Tensor:
    mean = bounded_exp(batch.mean_log_weight)
    return (mean < correction.low) | (mean > correction.high)


_MASKS: dict[str, Callable[[TokenBatch, Tensor, Correction], Tensor]] = {
    "icepop": _token_outside,
    "token_mask": _token_outside,
    "seq_mask": _trajectory_outside,
}


def out_of_bound(ratio: Tensor, batch: TokenBatch, settings: LossSettings) -> Tensor:
    """bool[T]: tokens that have moved too far in the direction of their advantage.

    ``ratio`` is the one that the loss clips. The bound is [1−ε, 1+ε+ε_h] with ``strict_in_bound``; otherwise
    [1 − ε·cap·d, 1 + (ε+ε_h)·cap·d], where cap is ``importance_weight_cap_ratio`` and
    d = exp(−age·``out_of_date_decay``), or 1 without a decay.
    """
    width = torch.ones_like(ratio)
    if not settings.strict_in_bound:
        width = width * settings.importance_weight_cap_ratio
        if settings.out_of_date_decay is not None:
            width = width * torch.exp(-batch.age.to(ratio.dtype) * settings.out_of_date_decay)
    lower = 1.0 - settings.epsilon * width
    upper = 1.0 + (settings.epsilon + settings.epsilon_higher) * width
    return ((batch.advantages > 0) & (ratio > upper)) | ((batch.advantages < 0) & (ratio < lower))
