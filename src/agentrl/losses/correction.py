"""Correct the mismatch between engine and trainer, and bound the staleness of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config.loss import Correction
from agentrl.losses.batch import LOG_RATIO_LIMIT, TokenBatch, bounded_exp
from agentrl.losses.settings import LossSettings


@dataclass(frozen=True, slots=True)
class Weighting:
    """Weights and masks of a micro-batch, each [T]."""

    weight: Tensor
    """float32, at least 0: a factor of the loss."""
    masked: Tensor
    """bool: tokens to drop."""
    capped: Tensor
    """bool: tokens whose weight a cap lowered."""


def weigh(batch: TokenBatch, settings: LossSettings) -> Weighting:
    """Return the weights and masks of all corrections; their order does not matter.

    The mismatch is w = π_old/μ, or ρ = πθ/μ where π_old is μ. In the second case the loss's ratio is ρ
    already: corrections only drop tokens, and the weight is 1. A loss that contains w (MINIRL) uses it
    uncapped unless a correction caps it; where π_old is μ, the cap applies to the ρ that the loss contains.
    """
    mismatch = bounded_exp(log_mismatch(batch, settings))
    weight, masked, capped = mismatch, torch.zeros_like(batch.mask), torch.zeros_like(batch.mask)
    for correction in settings.corrections:
        if correction.caps:
            weight = weight if correction.name == "tis" else _product(batch, settings)
            capped = weight > correction.high
            weight = weight.clamp(max=correction.high)
        else:
            masked = masked | _MASKS[correction.name](batch, settings, correction)
    contained = mismatch if settings.ratio_is_rho else torch.ones_like(mismatch)
    return Weighting(weight / contained if settings.weighs else torch.ones_like(mismatch), masked, capped)


def log_mismatch(batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Return the log-ratio that corrections use, float32[T], detached: log w, or log ρ if π_old is μ."""
    return batch.log_rho if settings.ratio_is_rho else batch.log_weight


def divergence(batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Return the k3 estimate of KL(μ‖π_old), or of KL(μ‖πθ) if π_old is μ, per token, float32[T] ≥ 0."""
    log = log_mismatch(batch, settings).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(log) - 1 - log


def _mean_log_mismatch(batch: TokenBatch, settings: LossSettings) -> Tensor:
    return batch.mean_log_rho if settings.ratio_is_rho else batch.mean_log_weight


def _product(batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Return the product of the ratios over each token's trajectory, float32[T]."""
    return bounded_exp(_mean_log_mismatch(batch, settings) * batch.trajectory_tokens)


def _outside(correction: Correction, values: Tensor) -> Tensor:
    return (values < correction.low) | (values > correction.high)


def _token_outside(batch: TokenBatch, settings: LossSettings, correction: Correction) -> Tensor:
    return _outside(correction, bounded_exp(log_mismatch(batch, settings)))


def _trajectory_outside(batch: TokenBatch, settings: LossSettings, correction: Correction) -> Tensor:
    return _outside(correction, bounded_exp(_mean_log_mismatch(batch, settings)))


def _trajectory_diverged(batch: TokenBatch, settings: LossSettings, correction: Correction) -> Tensor:
    if batch.means is not None:
        return _outside(correction, batch.means.divergence[batch.row])
    return _outside(correction, batch.trajectory_mean(divergence(batch, settings)))


_MASKS: dict[str, Callable[[TokenBatch, LossSettings, Correction], Tensor]] = {
    "icepop": _token_outside,
    "token_mask": _token_outside,
    "seq_mask": _trajectory_outside,
    "seq_kl": _trajectory_diverged,
}


def out_of_bound(batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Return bool[T], the tokens whose ρ = πθ/μ is out of bounds in the direction of their advantage.

    The bound is [1−ε, 1+ε+ε_h] with ``strict_in_bound``; otherwise [1 − ε·cap·d, 1 + (ε+ε_h)·cap·d], where
    cap is ``importance_weight_cap_ratio`` and d = exp(−age·``out_of_date_decay``), or 1 without a decay. A
    loss whose ratio is the trajectory's (GSPO) is bounded by the geometric mean of ρ over the trajectory.
    """
    if not settings.bounds_staleness:
        return torch.zeros_like(batch.mask)
    rho = bounded_exp(batch.mean_log_rho if settings.loss.reads_trajectory else batch.log_rho)
    width = torch.ones_like(rho)
    if not settings.strict_in_bound:
        width = width * settings.bound_scale
        if settings.out_of_date_decay is not None:
            width = width * torch.exp(-batch.age.to(rho.dtype) * settings.out_of_date_decay)
    lower = 1.0 - settings.lower_width * width
    upper = 1.0 + settings.upper_width * width
    return ((batch.advantages > 0) & (rho > upper)) | ((batch.advantages < 0) & (rho < lower))
