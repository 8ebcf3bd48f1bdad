"""What a loss takes and gives: flat tensors with one entry per trainable token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before ``exp``."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio in float32, clamped to ±20; the gradient is 0 where the clamp holds."""
    return torch.exp(log_ratio.float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def trajectory_mean(values: Tensor, mask: Tensor, row: Tensor, trajectories: int) -> Tensor:
    """Mean of ``values[T]`` over each trajectory's masked tokens, given back to every token: [T].

    A trajectory without a masked token has mean 0.
    """
    weights = mask.to(values.dtype)
    totals = values.new_zeros(trajectories).index_add(0, row, values * weights)
    counts = values.new_zeros(trajectories).index_add(0, row, weights)
    return (totals / counts.clamp(min=1.0))[row]


@dataclass(frozen=True, slots=True)
class TrajectoryMeans:
    """Means over whole trajectories, for micro-batches that hold parts of some."""

    log_ratio: Tensor
    """float32[R], of log πθ − log π_old."""
    log_weight: Tensor
    """float32[R], of log π_old − log μ."""
    divergence: Tensor
    """float32[R], of the k3 estimate that ``losses.correction.divergence`` gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trainable tokens of one micro-batch: T tokens of R trajectories, whole where not said otherwise.

    ``logprobs`` carries the gradient, and so may ``entropy``; every other tensor is data.
    """

    logprobs: Tensor
    """float32[T], log πθ."""
    old_logprobs: Tensor
    """float32[T], log π_old."""
    behavior_logprobs: Tensor
    """float32[T], log μ as the engine reported it."""
    advantages: Tensor
    """float32[T]."""
    row: Tensor
    """int64[T], trajectory index in [0, R)."""
    version: Tensor
    """int64[T], the policy version that sampled the token."""
    age: Tensor
    """int64[T], optimizer steps between the weights that sampled the token and those that train it, ≥ 0."""
    mask: Tensor
    """bool[T], the loss mask m: False tokens are in no numerator and no denominator."""
    trajectories: int
    """R."""
    reference_logprobs: Tensor | None = None
    """float32[T], log π_ref of the model that the policy is kept near."""
    lengths: Tensor | None = None
    """int64[R], tokens in the loss mask of each whole trajectory; None: what the micro-batch holds of it."""
    means: TrajectoryMeans | None = None
    """None: those of what the micro-batch holds."""
    entropy: Tensor | None = None
    """float32[T], entropy in nats of each token's distribution; with gradient if ``entropy_coef`` is set."""

    @property
    def log_ratio(self) -> Tensor:
        """log r = log πθ − log π_old, float32[T], with gradient."""
        return self.logprobs.float() - self.old_logprobs.float()

    @property
    def log_weight(self) -> Tensor:
        """log w = log π_old − log μ, float32[T]."""
        return self.old_logprobs.float() - self.behavior_logprobs.float()

    @property
    def log_rho(self) -> Tensor:
        """log ρ = log πθ − log μ, float32[T], detached."""
        return self.logprobs.detach().float() - self.behavior_logprobs.float()

    @property
    def mean_log_ratio(self) -> Tensor:
        """The mean of log r over each token's trajectory, float32[T], detached."""
        if self.means is not None:
            return self.means.log_ratio[self.row]
        return self.trajectory_mean(self.log_ratio.detach())

    @property
    def mean_log_weight(self) -> Tensor:
        """The mean of log w over each token's trajectory, float32[T]."""
        if self.means is not None:
            return self.means.log_weight[self.row]
        return self.trajectory_mean(self.log_weight)

    @property
    def mean_log_rho(self) -> Tensor:
        """The mean of log ρ over each token's trajectory, float32[T], detached."""
        return self.mean_log_ratio + self.mean_log_weight

    @property
    def trajectory_tokens(self) -> Tensor:
        """The number of tokens in the loss mask of each token's trajectory, float32[T]."""
        if self.lengths is not None:
            return self.lengths.float()[self.row]
        return torch.bincount(self.row[self.mask], minlength=self.trajectories).float()[self.row]

    def trajectory_mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values[T]`` over each token's trajectory within the micro-batch, [T]."""
        return trajectory_mean(values, self.mask, self.row, self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Per-token losses before any reduction, with what the metrics need."""

    losses: Tensor
    """float32[T] with gradient; 0 where ``masked``."""
    ratio: Tensor
    """float32[T], detached: the ratio that the loss clips (r; for GSPO the trajectory's s)."""
    clipped: Tensor
    """bool[T]: clipping took the token's gradient, or bounded it."""
    masked: Tensor
    """bool[T]: a bound or a correction took the token out of the numerator."""
    capped: Tensor | None = None
    """bool[T]: a correction capped the token's weight; None: no correction caps."""
