"""What losses read of whole trajectories, although a micro-batch may hold only parts of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
class ComparedTrajectories:
    """The N whole trajectories of an update, over all ranks, for losses that compare them; all is data."""

    number: Tensor
    """int64[R], the place of each row of the micro-batch in [0, N)."""
    score: Tensor
    """float32[N]."""
    group: Tensor
    """int64[N], the same for the trajectories of one group."""
    log_ratio: Tensor
    """float32[N], Σ over the trainable tokens of a trajectory of log πθ/π_ref."""
