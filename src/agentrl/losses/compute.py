"""Compute a micro-batch's loss: per token, with corrections and bonuses; reduced over the step; measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.config.training import OLD_LOGPROBS, VERSION_LOGPROBS, Correction
from agentrl.errors import ConfigError
from agentrl.losses.loss import LOG_RATIO_LIMIT, TEACHER, TokenBatch, TokenLosses, bounded_exp, k3
from agentrl.losses.settings import LossSettings

WEIGHT_CAP = 10.0
"""Cap of ρ = πθ/μ in ``weighted_k3``: it bounds the variance and biases tokens above it."""

_LEAST_PROBABILITY = 1e-8

DIVERGENCE = "teacher divergence"
"""The column of ``model.divergence.reverse_kl``, with gradient; 0 for a token without a teacher's ids."""


def token_losses(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """Return the loss of each token, [T], with corrections and bounds applied, before any reduction.

    Tokens with |log πθ/μ| above 20 (``TokenBatch.is_extreme``) are masked: their logprobs are wrong.
    The KL to a reference model (``kl_coef``) and the entropy bonus (``entropy_coef``) apply to every token,
    also to those that a bound or a correction drops. Raises ValueError if the batch lacks the tensors that
    they need.
    """
    if settings.distill_coef:
        batch = distilled(batch, settings)
    result = settings.loss(batch, settings)
    if not settings.loss.from_policy:
        return result
    weighting = weigh(batch, settings)
    masked = weighting.masked | out_of_bound(batch, settings) | batch.is_extreme
    # Select, do not multiply by the mask: a masked loss may be infinite, and 0 · inf is NaN.
    losses = torch.where(masked, 0.0, result.losses * weighting.weight)
    if settings.distill_coef and DIVERGENCE in batch.columns:
        losses = losses + settings.distill_coef * batch.columns[DIVERGENCE]
    if settings.kl_coef:
        losses = losses + settings.kl_coef * reference_kl(batch, settings.kl_estimator)
    if settings.entropy_coef:
        if batch.entropy is None:
            raise ValueError("the batch has no entropy")
        losses = losses - settings.entropy_coef * batch.entropy
    return replace(result, losses=losses, masked=masked, capped=weighting.capped)


def distilled(batch: TokenBatch, settings: LossSettings) -> TokenBatch:
    """Return the batch with ``distill_coef``·log π_teacher/πθ added to each token's advantage.

    It replaces the advantage where the loss ignores scores. A token without a teacher's value has 0 of it,
    and so has one whose ``DIVERGENCE`` is known. Raises ValueError for a batch without the column.
    """
    if not len(batch.row):  # the forest of a rank that has no data of the step has no columns either
        return batch
    if TEACHER not in batch.columns:
        raise ValueError(f"the batch has no column {TEACHER!r}: the run needs --columns {TEACHER}")
    own = torch.zeros_like(batch.advantages) if settings.loss.ignores_score else batch.advantages
    judged = float(settings.distill_coef or 0.0) * log_teacher_ratio(batch)
    if (divergence := batch.columns.get(DIVERGENCE)) is not None:
        judged = torch.where(divergence.detach() == 0, judged, 0.0)
    return replace(batch, advantages=own + judged)


def log_teacher_ratio(batch: TokenBatch) -> Tensor:
    """Return log π_teacher/πθ, float32[T], detached and within ±20; 0 where the teacher has no value."""
    gap = batch.columns[TEACHER].float() - batch.logprobs.detach().float()
    return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).nan_to_num(0.0)


def reference_kl(batch: TokenBatch, estimator: str) -> Tensor:
    """Return the estimate of the KL to the reference model per token in nats, float32[T], with gradient.

    Below, d = log πθ/π_ref.
    ``weighted_k3``: ρ·(e^−d − 1 + d) with ρ = πθ/μ capped at ``WEIGHT_CAP``. The gradient, ρ·d·∇log πθ, goes
    through ρ; under μ its expectation is the gradient of KL(πθ‖π_ref) (DeepSeek-V3.2, arXiv 2512.02556).
    The other estimators ignore μ and hold for tokens that πθ sampled.
    ``k3``: e^−d − 1 + d, never negative (GRPO, arXiv 2402.03300). Its value estimates KL(πθ‖π_ref), its
    gradient is that of KL(π_ref‖πθ).
    ``k2``: d²/2, with the gradient of KL(πθ‖π_ref) (arXiv 2510.01555).
    ``k1``: d. Its own gradient would vanish on average; it gets that of k2, d·∇log πθ, as if d were
    subtracted from the reward.
    Raises ValueError for a batch without reference logprobs.
    """
    if batch.reference_logprobs is None:
        raise ValueError("the batch has no reference logprobs")
    logprobs = batch.logprobs.float()
    log_ratio = (logprobs - batch.reference_logprobs.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k1":
        value = log_ratio.detach()
        return value + value * (logprobs - logprobs.detach())
    divergence = k3(-log_ratio).float()
    if estimator == "k3":
        return divergence
    weight = bounded_exp(batch.log_rho).clamp(max=WEIGHT_CAP)
    return weight * torch.exp(logprobs - logprobs.detach()) * divergence


def old_logprobs(
    method: str, logprobs: Tensor, behavior_logprobs: Tensor, age: Tensor, at_version: Tensor | None = None
) -> Tensor:
    """Return log π_old, float32[T], detached, as ``--old_logprobs`` says.

    ``behavior`` is log μ. ``recompute`` is ``logprobs``, the trainer's own at the start of the step; in a
    step of one optimizer update these are the logprobs of the update itself. ``loglinear`` is
    log μ + α·(log πθ − log μ) with α = a/(a + 1) for a token of ``age`` a, int64[T] in optimizer steps (the
    interpolation of AReaL, arXiv 2505.24298, and A-3PO, arXiv 2512.06547). ``version`` is the column
    ``at_version``, float32[T], the policy's own logprobs at the version that sampled each token, and
    ``logprobs`` for tokens of age 0: the trainer has that version's weights itself then, before they were
    rounded for publication. Raises ValueError for ``version`` without the column.
    """
    current, behavior = logprobs.detach().float(), behavior_logprobs.float()
    if method == "behavior":
        return behavior
    if method == "recompute":
        return current
    if method == "loglinear":
        steps = age.to(behavior.dtype)
        return behavior + steps / (steps + 1) * (current - behavior)
    if method == "version":
        if at_version is None:
            # The forest of a rank that has no data of the step has no columns either.
            if not len(current):
                return current
            raise ValueError(f"the batch has no column {VERSION_LOGPROBS!r}: the run needs it in --columns")
        return torch.where(age == 0, current, at_version.float())
    raise ConfigError(f"--old_logprobs is {method!r}", hint=f"use one of {', '.join(OLD_LOGPROBS)}")


@dataclass(frozen=True, slots=True)
class Denominators:
    """The counts that a step's loss is divided by, before any bound or correction drops a token.

    ``tokens`` is Σ m, ``trajectories`` the number of trajectories with at least one token in the mask.
    Sums over micro-batches and ranks are those of the whole step; a part of a trajectory counts as the share
    of its tokens that it holds.
    """

    tokens: int
    trajectories: float

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.tokens + other.tokens, self.trajectories + other.trajectories)


def reduce_losses(
    losses: Tensor,
    mask: Tensor,
    row: Tensor,
    trajectories: int,
    whole: Denominators,
    settings: LossSettings,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return a micro-batch's share of the step's loss, a float32 scalar.

    The shares of all micro-batches add up to the loss of the step, and so do their gradients. With
    ``token_level_loss`` it is Σ m·loss / Σ m. Without, it is the mean over trajectories of a trajectory's
    mean, of its sum with ``skip_length_normalization``, or of its sum over ``loss_length_divisor`` where that
    is set (Dr. GRPO, arXiv 2503.20783).

    losses float32[T]; mask bool[T]; row int64[T] in [0, ``trajectories``). ``lengths`` [``trajectories``] are
    the tokens in the mask of the whole trajectories; without it, a trajectory is whole in its micro-batch.
    ``whole`` counts the step over all micro-batches and ranks.
    """
    weights = mask.to(losses.dtype)
    if settings.token_level_loss:
        weights = weights / max(whole.tokens, 1)
    else:
        if settings.loss_length_divisor is not None:
            weights = weights / settings.loss_length_divisor
        elif not settings.skip_length_normalization:
            if lengths is None:
                lengths = weights.new_zeros(trajectories).index_add(0, row, weights)
            weights = weights / lengths.to(weights.dtype).clamp(min=1.0)[row]
        weights = weights / (whole.trajectories or 1.0)
    return (losses * weights).sum()


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
        if correction.name in ("seq_tis", "seq_icepop"):
            weight = _product(batch, settings)
        if not correction.caps:
            masked = masked | _is_dropped(batch, settings, correction)
            continue
        capped = weight > correction.high
        weight = weight.clamp(max=correction.high)
    contained = mismatch if settings.ratio_is_rho else torch.ones_like(mismatch)
    return Weighting(weight / contained if settings.weighs else torch.ones_like(mismatch), masked, capped)


def _is_dropped(batch: TokenBatch, settings: LossSettings, correction: Correction) -> Tensor:
    """Return bool[T], the tokens with a value outside the correction's bounds."""
    if correction.name == "seq_kl":
        if batch.means is not None:
            values = batch.means.divergence[batch.row]
        else:
            values = batch.trajectory_mean(divergence(batch, settings))
    elif correction.name == "kpop":
        values = binary_divergence(batch, settings)
    elif correction.name == "seq_mask":
        values = bounded_exp(_mean_log_mismatch(batch, settings))
    elif correction.name == "seq_icepop":
        values = _product(batch, settings)
    else:
        values = bounded_exp(log_mismatch(batch, settings))
    return (values < correction.low) | (values > correction.high)


def log_mismatch(batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Return the log-ratio that corrections use, float32[T], detached: log w, or log ρ if π_old is μ."""
    return batch.log_rho if settings.ratio_is_rho else batch.log_weight


def divergence(batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Return the k3 estimate of KL(μ‖π_old), or of KL(μ‖πθ) if π_old is μ, per token, float64[T] ≥ 0."""
    return k3(log_mismatch(batch, settings))


def binary_divergence(batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Return the larger of KL(p‖q) and KL(q‖p) per token, float64[T] ≥ 0 (KPop, ringtech.notion.site/kpop).

    p and q are Bernoulli distributions: whether π_old, or πθ if π_old is μ, and whether μ sample the token.
    Probabilities are kept 1e-8 away from 0 and 1, as AReaL does; float32 would round 1 − 1e-8 to 1.
    """
    log_q = batch.behavior_logprobs.double()
    p, q = (
        log.exp().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
        for log in (log_q + log_mismatch(batch, settings), log_q)
    )
    log_ratio, log_ratio_of_others = p.log() - q.log(), (-p).log1p() - (-q).log1p()
    forward = p * log_ratio + (1 - p) * log_ratio_of_others
    # Rounding leaves a little below 0 where p is q, and a limit would drop that.
    return torch.maximum(forward, -q * log_ratio - (1 - q) * log_ratio_of_others).clamp(min=0.0)


def _mean_log_mismatch(batch: TokenBatch, settings: LossSettings) -> Tensor:
    return batch.mean_log_rho if settings.ratio_is_rho else batch.mean_log_weight


def _product(batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Return the product of the mismatch over each token's trajectory, float32[T]."""
    return bounded_exp(_mean_log_mismatch(batch, settings) * batch.trajectory_tokens)


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


Ints = NDArray[np.int64]
_SUMS = (
    "tokens", "ratio_max", "clip_ratio_max", "clipped", "masked", "capped", "extreme", "kl_k1", "kl_k3",
    "entropy", "ratio", "ratio_squared", "kl_reference", "taught", "kl_teacher", "kl_mismatch",
    "kl_staleness", "fresh", "version_gap",
)  # fmt: skip
"""Names of what ``measure`` returns; NaN without the reference model or the column that a sum needs."""
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
    kl_mismatch: float | None = None
    """Σ of the k3 estimate of KL(μ‖π_old); None unless π_old is that of the token's version."""
    kl_staleness: float | None = None
    """Σ of the k3 estimate of KL(π_old‖πθ)."""
    fresh: float | None = None
    """Tokens of age 0."""
    version_gap: float | None = None
    """Σ over these of |the column's logprob − the trainer's own|."""
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
        k1 estimate of KL(πθ‖π_teacher) from these. With ``--old_logprobs version``, ``kl_mismatch`` and
        ``kl_staleness`` are the k3 estimates of KL(μ‖π_old) and KL(π_old‖πθ), and ``version_gap`` is the mean
        difference, in nats, of the stored and the trainer's own logprob of tokens of age 0.
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
            **({} if self.kl_mismatch is None else {"kl_mismatch": self.kl_mismatch / count}),
            **({} if self.kl_staleness is None else {"kl_staleness": self.kl_staleness / count}),
            **({"version_gap": (self.version_gap or 0.0) / self.fresh} if self.fresh else {}),
            "effective_sample_size": self.ratio**2 / (count * self.ratio_squared),
            "staleness_mean": sum(age * tokens for age, tokens in self.staleness.items()) / count,
            "staleness_max": float(max(self.staleness)),
            "staleness_histogram": {str(age): float(n) for age, n in sorted(self.staleness.items())},
            "version_fractions": {str(version): n / count for version, n in sorted(self.versions.items())},
        }


def measure(batch: TokenBatch, result: TokenLosses, entropy: Tensor, *, by_version: bool = False) -> Tensor:
    """Return a micro-batch's sums, float64[19], on its device: the host does not wait for them.

    ``entropy`` float32[T] is the policy's, in nats. ``by_version``: π_old is that of each token's version.
    """
    mask = batch.mask
    log_rho = torch.where(mask, batch.log_rho, 0.0)
    ratio = torch.where(mask, bounded_exp(log_rho).double(), 0.0)
    capped = torch.zeros_like(mask) if result.capped is None else result.capped
    sums = [
        mask.double().sum(),
        # Append a 0: a micro-batch may have no token, and max() of nothing raises.
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
    if by_version and VERSION_LOGPROBS in batch.columns:
        fresh = mask & (batch.age == 0)
        gap = (batch.columns[VERSION_LOGPROBS] - batch.old_logprobs).abs()
        sums += [
            torch.where(mask, k3(batch.log_weight), 0.0).sum(),
            torch.where(mask, k3(batch.log_ratio.detach()), 0.0).sum(),
            fresh.double().sum(),
            torch.where(fresh, gap.double(), 0.0).sum(),
        ]
    else:
        sums += [absent] * 4
    return torch.stack(sums)


def _count(values: Ints) -> Counter[int]:
    kinds, counts = np.unique(values, return_counts=True)
    return Counter(dict(zip(kinds.tolist(), counts.tolist(), strict=True)))
