"""Measure the tokens of a step: ratios, divergences, entropy, ages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.losses.compute import log_teacher_ratio, reference_kl
from agentrl.losses.loss import TEACHER, TokenBatch, TokenLosses, bounded_exp, k3

Ints = NDArray[np.int64]
_SUMS = (
    "tokens", "ratio_max", "clip_ratio_max", "clipped", "masked", "capped", "extreme", "kl_k1", "kl_k3",
    "entropy", "ratio", "ratio_squared", "kl_reference", "taught", "kl_teacher",
)  # fmt: skip
"""Names of what ``measure`` returns; NaN without the reference model or the teacher that a sum needs."""
_MAXIMA = ("ratio_max", "clip_ratio_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMetrics:
    """Sums over the tokens in the loss mask of one or more micro-batches; ``+`` adds two."""

    loss: float = 0.0
    """The part of the step's loss that these micro-batches have."""
    tokens: int = 0
    ratio: float = 0.0
    """Σ πθ/μ."""
    ratio_squared: float = 0.0
    ratio_max: float = 0.0
    clip_ratio_max: float = 0.0
    """Largest ratio that the loss clips."""
    clipped: float = 0.0
    masked: float = 0.0
    capped: float = 0.0
    extreme: float = 0.0
    kl_k1: float = 0.0
    kl_k3: float = 0.0
    entropy: float = 0.0
    kl_reference: float | None = None
    """Σ of the k3 estimate of KL(πθ‖π_ref); None without a reference model."""
    taught: float | None = None
    """Tokens that the teacher has a value of; None without a teacher."""
    kl_teacher: float | None = None
    """Σ log πθ/π_teacher over these."""
    staleness: Counter[int] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, loss: float, sums: Sequence[float], ages: Ints, versions: Ints) -> Self:
        """Return the metrics of a micro-batch: ``measure``'s result, and age and version of each token."""
        values = {name: value for name, value in zip(_SUMS, sums, strict=True) if value == value}
        tokens = int(values.pop("tokens"))
        return cls(loss=loss, tokens=tokens, **values, staleness=_count(ages), versions=_count(versions))

    def __add__(self, other: TokenMetrics) -> TokenMetrics:
        pairs = {item.name: (getattr(self, item.name), getattr(other, item.name)) for item in fields(self)}
        joined: dict[str, Any] = {name: max(pairs.pop(name)) for name in _MAXIMA}
        for name, (one, more) in pairs.items():
            joined[name] = more if one is None else one if more is None else one + more
        return TokenMetrics(**joined)

    def report(self) -> dict[str, float | dict[str, float]]:
        """Return the step's metrics, per token; empty without a token.

        ``ratio_mean`` and ``ratio_max`` are of πθ/μ, ``clip_ratio_max`` is of the ratio that the loss clips.
        ``clipped_fraction`` counts tokens that this clip bounds, ``masked_fraction`` those that bounds on
        staleness and corrections drop or that are extreme, ``capped_fraction`` those whose weight ``tis`` or
        ``seq_tis`` lowers. ``extreme_tokens`` is the number of tokens with πθ/μ beyond e^±20.
        ``kl_k1`` and ``kl_k3`` estimate KL(μ‖πθ) in nats (k1: log μ/πθ; k3: πθ/μ − 1 − log πθ/μ).
        ``kl_reference`` is the k3 estimate of KL(πθ‖π_ref), if there is a reference model. If there is a
        teacher, ``taught_fraction`` is the share of the tokens that it has a value of, and ``kl_teacher`` the
        k1 estimate of KL(πθ‖π_teacher) from these.
        ``effective_sample_size`` is (Σω)²/(n·Σω²) of ω = πθ/μ, in (0, 1]. ``staleness_histogram`` maps an age
        in optimizer steps to tokens and ``version_fractions`` a policy version to its share of the tokens;
        both have text keys, as documents need them.
        """
        count = self.tokens
        if count == 0:
            return {}
        return {
            "ratio_mean": self.ratio / count,
            "ratio_max": self.ratio_max,
            "clip_ratio_max": self.clip_ratio_max,
            "clipped_fraction": self.clipped / count,
            "masked_fraction": self.masked / count,
            "capped_fraction": self.capped / count,
            "extreme_tokens": self.extreme,
            "kl_k1": self.kl_k1 / count,
            "kl_k3": self.kl_k3 / count,
            "entropy": self.entropy / count,
            **({} if self.kl_reference is None else {"kl_reference": self.kl_reference / count}),
            **({} if self.taught is None else {"taught_fraction": self.taught / count}),
            **({"kl_teacher": (self.kl_teacher or 0.0) / self.taught} if self.taught else {}),
            "effective_sample_size": self.ratio**2 / (count * self.ratio_squared),
            "staleness_mean": sum(age * tokens for age, tokens in self.staleness.items()) / count,
            "staleness_max": float(max(self.staleness)),
            "staleness_histogram": {str(age): float(n) for age, n in sorted(self.staleness.items())},
            "version_fractions": {str(version): n / count for version, n in sorted(self.versions.items())},
        }


def measure(batch: TokenBatch, result: TokenLosses, entropy: Tensor) -> Tensor:
    """Return a micro-batch's sums, float64[15], on its device: the host does not wait for them.

    ``entropy`` float32[T] is the policy's, in nats.
    """
    mask = batch.mask
    log_rho = torch.where(mask, batch.log_rho, 0.0)
    ratio = torch.where(mask, bounded_exp(log_rho).double(), 0.0)
    capped = torch.zeros_like(mask) if result.capped is None else result.capped
    sums = [
        mask.double().sum(),
        *(
            torch.cat([torch.where(mask, each.double(), 0.0), ratio.new_zeros(1)]).max()
            for each in (ratio, result.ratio)
        ),
        (result.clipped & mask).double().sum(),
        (result.masked & mask).double().sum(),
        (capped & mask).double().sum(),
        (batch.is_extreme & mask).double().sum(),
        -log_rho.double().sum(),
        k3(log_rho).sum(),
        torch.where(mask, entropy.double(), 0.0).sum(),
        ratio.sum(),
        (ratio * ratio).sum(),
    ]
    absent = torch.full_like(sums[0], torch.nan)
    if batch.reference_logprobs is None:
        sums.append(absent)
    else:
        sums.append(torch.where(mask, reference_kl(batch, "k3").detach().double(), 0.0).sum())
    if TEACHER in batch.columns:
        sums.append((mask & ~batch.columns[TEACHER].isnan()).double().sum())
        sums.append(torch.where(mask, -log_teacher_ratio(batch).double(), 0.0).sum())
    else:
        sums += [absent, absent]
    return torch.stack(sums)


def _count(values: Ints) -> Counter[int]:
    kinds, counts = np.unique(values, return_counts=True)
    return Counter(dict(zip(kinds.tolist(), counts.tolist(), strict=True)))
