"""Importance corrections for μ ≠ π_old, and bounds for tokens that went stale."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.losses.batch import TokenBatch, bounded_exp, trajectory_mean
from agentrl.losses.settings import LossSettings


@dataclass(frozen=True, slots=True)
class Correction:
    """One entry of ``--importance_correction``: its name and its bounds on w = π_old/μ."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Weighting:
    """What the corrections make of a micro-batch: a factor float32[T] ≥ 0, and tokens to drop, bool[T]."""

    weight: Tensor
    masked: Tensor


_DEFAULTS = {
    "tis": Correction("tis", 0.0, 2.0),
    "icepop": Correction("icepop", 0.5, 5.0),
    "seq_mask": Correction("seq_mask", 0.9, 1.1),
    "token_mask": Correction("token_mask", 0.5, 2.0),
}


def parse_corrections(text: str) -> tuple[Correction, ...]:
    """Read ``--importance_correction``: names with optional bounds, comma-separated.

    ``tis[:C]`` weights by w capped at C (truncated importance sampling; default 2, ``inf`` caps nothing).
    ``icepop[:low:high]`` (0.5, 5) weights by w and drops tokens whose w is outside.
    ``seq_mask[:low:high]`` (0.9, 1.1) drops trajectories whose geometric mean of w is outside.
    ``token_mask[:low:high]`` (0.5, 2) drops tokens whose w is outside, and weights none.
    Raises ConfigError for an unknown name, a repeated one or bounds that are none.
    """
    corrections: list[Correction] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        correction = _parse_one(entry)
        if correction.name in {earlier.name for earlier in corrections}:
            raise ConfigError(
                f"--importance_correction names {correction.name!r} twice", cure="name each correction once"
            )
        corrections.append(correction)
    return tuple(corrections)


def _parse_one(entry: str) -> Correction:
    name, *numbers = entry.split(":")
    if name not in _DEFAULTS:
        nearest = difflib.get_close_matches(name, _DEFAULTS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"--importance_correction names {name!r}, which is none of {', '.join(_DEFAULTS)}",
            cure=f"did you mean {nearest!r}?",
        )
    if not numbers:
        return _DEFAULTS[name]
    form = "tis:C" if name == "tis" else f"{name}:low:high"
    cure = f"write it as {form} with numbers, 0 ≤ low < high"
    try:
        bounds = [float(number) for number in numbers]
    except ValueError as error:
        raise ConfigError(f"--importance_correction has {entry!r}", cure=cure) from error
    if name == "tis":
        bounds = [0.0, *bounds]
    if len(bounds) != 2 or any(math.isnan(bound) for bound in bounds) or not 0 <= bounds[0] < bounds[1]:
        raise ConfigError(f"--importance_correction has {entry!r}", cure=cure)
    return Correction(name, bounds[0], bounds[1])


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
    mean = bounded_exp(trajectory_mean(batch.log_weight, batch.mask, batch.row, batch.trajectories))
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
    d = exp(min(0, version − current)·``out_of_date_decay``), or 1 without a decay.
    """
    width = torch.ones_like(ratio)
    if not settings.strict_in_bound:
        width = width * settings.importance_weight_cap_ratio
        if settings.out_of_date_decay is not None:
            width = width * torch.exp(-batch.staleness.to(ratio.dtype) * settings.out_of_date_decay)
    lower = 1.0 - settings.epsilon * width
    upper = 1.0 + (settings.epsilon + settings.epsilon_higher) * width
    return ((batch.advantages > 0) & (ratio > upper)) | ((batch.advantages < 0) & (ratio < lower))
