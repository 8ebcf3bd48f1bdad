"""The input and output of a loss: flat tensors with one entry per trainable token; import no torch itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before ``exp``."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio in float32, clamped to ±20; the gradient is 0 where it is clamped."""
    return log_ratio.float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True, slots=True)
class TrajectoryMeans:
    """Means over whole trajectories, for micro-batches that hold only parts of some."""

    log_ratio: Tensor
    """float32[R], of log πθ − log π_old."""
    log_weight: Tensor
    """float32[R], of log π_old − log μ."""
    divergence: Tensor
    """float32[R], of ``losses.compute.divergence``, the k3 estimate of the KL from μ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trainable tokens of one micro-batch: T tokens of R trajectories.

    ``logprobs`` carries the gradient, and ``entropy`` may carry one; every other tensor is data. Trajectories
    are whole unless ``lengths`` and ``means`` are given.
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
    """int64[T], optimizer steps between the weights that sampled the token and the current ones, ≥ 0."""
    mask: Tensor
    """bool[T], the loss mask m: a False token counts in no numerator and no denominator."""
    trajectories: int
    """R."""
    reference_logprobs: Tensor | None = None
    """float32[T], log π_ref of the reference model of ``--kl_coef``."""
    lengths: Tensor | None = None
    """int64[R], tokens in the loss mask of each whole trajectory; None: count those of the micro-batch."""
    means: TrajectoryMeans | None = None
    """None: compute them from the tokens of the micro-batch."""
    entropy: Tensor | None = None
    """float32[T], entropy in nats of each token's distribution; with gradient if ``entropy_coef`` is set."""

    @property
    def log_ratio(self) -> Tensor:
        """Return log r = log πθ − log π_old, float32[T], with gradient."""
        return self.logprobs.float() - self.old_logprobs.float()

    @property
    def log_weight(self) -> Tensor:
        """Return log w = log π_old − log μ, float32[T]."""
        return self.old_logprobs.float() - self.behavior_logprobs.float()

    @property
    def log_rho(self) -> Tensor:
        """Return log ρ = log πθ − log μ, float32[T], detached."""
        return self.logprobs.detach().float() - self.behavior_logprobs.float()

    @property
    def is_extreme(self) -> Tensor:
        """Return bool[T], the tokens with |log ρ| above ``LOG_RATIO_LIMIT``: no update moves that far."""
        return self.log_rho.abs() > LOG_RATIO_LIMIT

    @property
    def mean_log_ratio(self) -> Tensor:
        """Return the mean of log r over each token's trajectory, float32[T], detached."""
        if self.means is not None:
            return self.means.log_ratio[self.row]
        return self.trajectory_mean(self.log_ratio.detach())

    @property
    def mean_log_weight(self) -> Tensor:
        """Return the mean of log w over each token's trajectory, float32[T]."""
        if self.means is not None:
            return self.means.log_weight[self.row]
        return self.trajectory_mean(self.log_weight)

    @property
    def mean_log_rho(self) -> Tensor:
        """Return the mean of log ρ over each token's trajectory, float32[T], detached."""
        return self.mean_log_ratio + self.mean_log_weight

    @property
    def trajectory_tokens(self) -> Tensor:
        """Return the number of tokens in the loss mask of each token's trajectory, float32[T]."""
        if self.lengths is not None:
            return self.lengths.float()[self.row]
        return self.row[self.mask].bincount(minlength=self.trajectories).float()[self.row]

    def trajectory_mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values[T]`` over each token's trajectory within the micro-batch, [T].

        Tokens outside ``mask`` do not count. A trajectory without a token in it has mean 0.
        """
        weights = self.mask.to(values.dtype)
        totals = values.new_zeros(self.trajectories).index_add(0, self.row, values * weights)
        counts = values.new_zeros(self.trajectories).index_add(0, self.row, weights)
        return (totals / counts.clamp(min=1.0))[self.row]


_NONE: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Per-token losses before any reduction, and what the metrics need. Only ``losses`` must be given."""

    losses: Tensor
    """float32[T] with gradient; 0 where ``masked``."""
    ratio: Tensor = _NONE
    """float32[T], detached: the ratio that the loss clips (r; for GSPO the trajectory's s). Default: 1."""
    clipped: Tensor = _NONE
    """bool[T]: clipping removed or bounded the token's gradient. Default: no token."""
    masked: Tensor = _NONE
    """bool[T]: a bound or a correction removed the token from the numerator. Default: no token."""
    capped: Tensor | None = None
    """bool[T]: a correction capped the token's weight; None: no correction caps."""

    def __post_init__(self) -> None:
        import torch

        losses = self.losses.detach()
        if self.ratio is None:
            object.__setattr__(self, "ratio", torch.ones_like(losses))
        for name in ("clipped", "masked"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, torch.zeros_like(losses, dtype=torch.bool))
