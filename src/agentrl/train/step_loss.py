"""A step's loss, a micro-batch at a time: from a forest's logprobs to its share and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from agentrl.data.forest import TokenForest
from agentrl.losses.batch import TokenBatch, TrajectoryMeans, old_logprobs
from agentrl.losses.compute import Denominators, reduce_losses, token_losses
from agentrl.losses.correction import divergence
from agentrl.losses.metrics import TokenMetrics
from agentrl.losses.settings import LossSettings


@dataclass(frozen=True, slots=True)
class TrajectorySums:
    """Sums over the trainable tokens of each trajectory of a step; float64[trajectories] or longer."""

    log_ratio: Tensor
    """Σ log πθ/π_old."""
    log_weight: Tensor
    """Σ log π_old/μ."""
    divergence: Tensor
    """Σ of ``losses.correction.divergence``."""

    @staticmethod
    def of_tokens(batch: TokenBatch, settings: LossSettings) -> Tensor:
        """Return the summands, float64[3, T], a row per field."""
        rows = [batch.log_ratio.detach(), batch.log_weight, divergence(batch, settings)]
        return torch.stack(rows).double()

    def means(self, forest: TokenForest) -> TrajectoryMeans:
        """The means of ``forest``'s rows."""
        device = self.log_ratio.device
        number = torch.from_numpy(forest.trajectory).to(device)
        count = torch.from_numpy(np.maximum(forest.row_tokens, 1)).to(device)
        return TrajectoryMeans(
            *((sums[number] / count).float() for sums in (self.log_ratio, self.log_weight, self.divergence))
        )


@dataclass(slots=True, kw_only=True)
class StepLoss:
    """The loss and the metrics of a step, summed over the micro-batches that ``add`` was given."""

    settings: LossSettings
    whole: Denominators
    """Of the whole step."""
    sums: TrajectorySums | None = None
    """Where the loss reads whole trajectories and a forest holds parts of one."""
    loss: float = 0.0
    metrics: TokenMetrics = field(default_factory=TokenMetrics)

    def add(self, forest: TokenForest, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """The share of the loss that ``forest`` has, with gradient to its ``logprobs`` (float32[T]).

        It has one to its ``entropy`` (float32[T]) too where the loss has a bonus on it.
        """
        means = None if self.sums is None else self.sums.means(forest)
        batch = token_batch(forest, logprobs, self.settings, means)
        batch = replace(batch, entropy=entropy)
        result = token_losses(batch, self.settings)
        share = reduce_losses(
            result.losses, batch.mask, batch.row, batch.trajectories, self.whole, self.settings, batch.lengths
        )
        self.loss += float(share.detach())
        self.metrics = self.metrics + TokenMetrics.of(batch, result, entropy.detach())
        return share


def token_batch(
    forest: TokenForest,
    logprobs: Tensor,
    settings: LossSettings,
    means: TrajectoryMeans | None = None,
) -> TokenBatch:
    """A forest's trainable tokens as losses take them. Supervised data have no behavior policy: μ = πθ.

    ``means`` are needed where the forest holds parts of trajectories and the loss reads whole ones.
    """
    row, version, age, advantages, behavior, lengths = (
        torch.from_numpy(array).to(logprobs.device)
        for array in (
            forest.row, forest.version, forest.age, forest.advantage, forest.behavior_logprob,
            forest.row_tokens,
        )
    )  # fmt: skip
    start, reference = (
        None if array is None else torch.from_numpy(array).to(logprobs.device)
        for array in (forest.start_logprob, forest.reference_logprob)
    )
    if not settings.loss.from_policy:
        behavior = logprobs.detach()
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=old_logprobs(settings.old_logprobs, logprobs if start is None else start, behavior, age),
        reference_logprobs=reference,
        behavior_logprobs=behavior,
        advantages=advantages,
        row=row,
        version=version,
        age=age,
        mask=torch.ones_like(row, dtype=torch.bool),
        trajectories=forest.trajectories,
        lengths=lengths,
        means=means,
    )
