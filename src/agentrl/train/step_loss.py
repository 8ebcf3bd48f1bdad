"""Compute a step's loss one micro-batch at a time: forest and logprobs → loss, metrics, token values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.data.forest import TokenForest
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.training import DBRecordData, TrainableSpan
from agentrl.errors import ForestError
from agentrl.losses.compute import (
    DIVERGENCE,
    Denominators,
    divergence,
    old_logprobs,
    reduce_losses,
    token_losses,
)
from agentrl.losses.loss import TokenBatch
from agentrl.losses.settings import LossSettings
from agentrl.losses.token_metrics import TokenMetrics, measure
from agentrl.losses.trajectories import ComparedTrajectories, TrajectoryMeans
from agentrl.model.forward import ForwardOptions


@dataclass(slots=True)
class StepLoss:
    """The loss of one update, one forest at a time.

    The values of each forest stay on the device until ``report``: a host that read them after each forest
    would wait for the device, which then waits for the host's next forward.
    """

    settings: LossSettings
    whole: Denominators
    """Of the whole update, over all ranks."""
    tokens: int
    """Tokens of the whole update, over all ranks."""
    sums: TrajectorySums | None = None
    """Given if the loss compares trajectories, or reads whole ones and a forest holds parts of one."""
    recorder: TokenRecorder | None = None
    """Gets the values of single tokens."""
    compared: ComparedTrajectories | None = None
    """Those of the update, if the loss compares them; without ``number``, which each forest has."""
    _added: list[tuple[TokenForest, Tensor]] = field(default_factory=list)
    """Each forest with its part of the loss and its ``measure``."""

    @classmethod
    def start(
        cls,
        model: ParallelModel,
        forests: Sequence[TokenForest],
        settings: LossSettings,
        options: ForwardOptions,
        recorder: TokenRecorder | None = None,
        data: Sequence[DBRecordData] = (),
    ) -> StepLoss:
        """Count an update's tokens and trajectories over all ranks, and sum what it needs of trajectories.

        ``forests`` are this rank's; ``data`` are the update's, of all ranks. Raises ForestError if no token
        is trainable.
        """
        own, own_tokens = count_step(forests), sum(forest.tokens for forest in forests)
        counts = torch.tensor([own.tokens, own.trajectories, own_tokens], dtype=torch.float64)
        trainable_tokens, trajectories, tokens = model.mesh.sum(counts.to(model.model.device)).tolist()
        whole = Denominators(round(trainable_tokens), trajectories)
        if whole.tokens == 0:
            raise ForestError(
                "a step without a trainable token", hint="leave out data without trainable spans"
            )
        sums = sum_trajectories(model, forests, settings, options)
        compared = None
        if settings.loss.compares:
            assert sums is not None
            compared = sums.compared(data)
        return cls(settings, whole, round(tokens), sums, recorder, compared)

    def add(
        self, forest: TokenForest, logprobs: Tensor, entropy: Tensor, divergence: Tensor | None = None
    ) -> Tensor:
        """Return the part of the loss that ``forest`` has, with gradient to its ``logprobs`` (float32[T]).

        With an entropy bonus, it has a gradient to its ``entropy`` (float32[T]) too, and with a teacher's
        likeliest ids to the ``divergence`` (float32[T]) from them.
        """
        if self.recorder is not None:
            self.recorder.add(forest, logprobs, entropy)
        means = None if self.sums is None else self.sums.means(forest)
        batch = replace(token_batch(forest, logprobs, self.settings, means), entropy=entropy)
        if divergence is not None:
            batch = replace(batch, columns={**batch.columns, DIVERGENCE: divergence})
        if self.compared is not None:
            number = torch.from_numpy(forest.trajectory).to(logprobs.device)
            batch = replace(batch, compared=replace(self.compared, number=number))
        result = token_losses(batch, self.settings)
        part = reduce_losses(
            result.losses, batch.mask, batch.row, batch.trajectories, self.whole, self.settings, batch.lengths
        )
        measured = measure(batch, result, entropy.detach())
        self._added.append((forest, torch.cat([part.detach().double()[None], measured])))
        return part

    def report(self) -> TokenMetrics:
        """Return the metrics of the forests that were added; waits for the device."""
        total = TokenMetrics()
        values = torch.stack([values for _, values in self._added]).tolist() if self._added else []
        for (forest, _), (loss, *sums) in zip(self._added, values, strict=True):
            total += TokenMetrics.of(loss, sums, forest.age, forest.version)
        return total


def token_batch(
    forest: TokenForest,
    logprobs: Tensor,
    settings: LossSettings,
    means: TrajectoryMeans | None = None,
) -> TokenBatch:
    """Return a forest's trainable tokens as losses take them.

    Supervised data have no behavior policy: their behavior logprobs are the policy's own. ``means`` are
    needed if the forest holds parts of trajectories and the loss reads whole ones.
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
    if not settings.loss.from_policy and not settings.loss.compares:
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
        columns={
            name: torch.from_numpy(values).to(logprobs.device)
            for name, values in ({} if forest.columns is None else forest.columns.values).items()
        },
    )


def count_step(forests: Sequence[TokenForest]) -> Denominators:
    """Count the trainable tokens and the trajectories of ``forests``; a trajectory's parts add up to 1."""
    total = Denominators(0, 0)
    for forest in forests:
        whole = forest.row_tokens[forest.row]
        total = total + Denominators(forest.trainable_tokens, float((1.0 / whole).sum()))
    return total


@dataclass(frozen=True, slots=True)
class TrajectorySums:
    """Sums over the trainable tokens of each trajectory of a step; float64[trajectories] or longer."""

    log_ratio: Tensor
    """Σ log πθ/π_old."""
    log_weight: Tensor
    """Σ log π_old/μ."""
    divergence: Tensor
    """Σ of ``losses.compute.divergence``."""
    log_reference: Tensor
    """Σ log πθ/π_ref; 0 without a reference model."""

    @staticmethod
    def of_tokens(batch: TokenBatch, settings: LossSettings) -> Tensor:
        """Return the summands, float64[4, T], a row per field."""
        reference = batch.logprobs if batch.reference_logprobs is None else batch.reference_logprobs
        rows = [
            batch.log_ratio, batch.log_weight, divergence(batch, settings), batch.logprobs - reference,
        ]  # fmt: skip
        return torch.stack(rows).detach().double()

    def means(self, forest: TokenForest) -> TrajectoryMeans:
        """Return the means over the trajectory of each of ``forest``'s rows."""
        device = self.log_ratio.device
        number = torch.from_numpy(forest.trajectory).to(device)
        count = torch.from_numpy(np.maximum(forest.row_tokens, 1)).to(device)
        return TrajectoryMeans(
            *((sums[number] / count).float() for sums in (self.log_ratio, self.log_weight, self.divergence))
        )

    def compared(self, data: Sequence[DBRecordData]) -> ComparedTrajectories:
        """Return ``data``, the trajectories of an update in the order in which its forests number them."""
        device = self.log_reference.device
        groups = {task: number for number, task in enumerate(dict.fromkeys(item.task for item in data))}
        return ComparedTrajectories(
            number=torch.empty(0, dtype=torch.int64, device=device),
            score=torch.tensor([item.score for item in data], device=device),
            group=torch.tensor([groups[item.task] for item in data], device=device),
            log_ratio=self.log_reference[: len(data)].float(),
        )


@torch.no_grad()
def sum_trajectories(
    model: ParallelModel, forests: Sequence[TokenForest], settings: LossSettings, options: ForwardOptions
) -> TrajectorySums | None:
    """Sum what a loss reads of whole trajectories, by one more forward over each forest; None if not needed.

    It is needed if the loss compares trajectories (DPO, KTO), and if the loss of a token depends on its
    whole trajectory (GSPO, corrections named ``seq_…``) and a forest of any rank holds a part of one.
    """
    if not settings.reads_trajectory and not settings.loss.compares:
        return None
    device = model.model.device
    numbers = 1 + max((int(forest.trajectory.max(initial=-1)) for forest in forests), default=-1)
    is_needed = settings.loss.compares or any(forest.holds_parts for forest in forests)
    found = torch.tensor([is_needed, numbers], device=device)
    found = model.mesh.sum(found)
    if not found[0]:
        return None
    sums = torch.zeros(4, int(found[1]), dtype=torch.float64, device=device)
    for forest, (logprobs, _) in zip(forests, model.logprobs(forests, options), strict=True):
        batch = token_batch(forest, logprobs, settings)
        number = torch.from_numpy(forest.trajectory[forest.row]).to(device)
        sums.index_add_(1, number, TrajectorySums.of_tokens(batch, settings))
    return TrajectorySums(*model.mesh.sum(sums))


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What a step computed of the tokens that it trained of one trajectory, float32[T] in order of spans."""

    record: str
    spans: tuple[TrainableSpan, ...]
    log_ratio: NDArray[np.float32]
    """log πθ − log μ, in nats."""
    entropy: NDArray[np.float32]
    """Of the policy's distribution, in nats."""


class TokenRecorder:
    """Collects the values of one update's chosen trajectories on this rank."""

    def __init__(self, data: Sequence[DBRecordData], chosen: Collection[str], device: torch.device) -> None:
        """``data`` are those of the update, in the order in which its forests number them."""
        sizes = np.array([item.trainable_tokens if item.id in chosen else 0 for item in data], np.int64)
        self._data = [item for item in data if item.id in chosen]
        self._first = np.where(sizes > 0, np.cumsum(sizes) - sizes, -1)
        self._values = torch.zeros(2, int(sizes.sum()), device=device)

    def add(self, forest: TokenForest, logprobs: Tensor, entropy: Tensor) -> None:
        """Copy the values of the chosen trajectories from a micro-batch; both tensors are float32[T]."""
        first = self._first[forest.trajectory][forest.row]
        chosen = np.flatnonzero(first >= 0)
        if not chosen.size:
            return
        here, indices, behavior = (
            torch.from_numpy(array).to(self._values.device)
            for array in (chosen, first[chosen] + forest.label[chosen], forest.behavior_logprob[chosen])
        )
        log_ratio = logprobs.detach().float()[here] - behavior
        self._values[:, indices] = torch.stack([log_ratio, entropy.detach().float()[here]])

    def collect(self, mesh: Mesh) -> list[TokenValues]:
        """Return the values of all ranks by trajectory; every rank calls it."""
        log_ratio, entropy = mesh.sum(self._values, stages=True).cpu().numpy()
        ends = np.cumsum([item.trainable_tokens for item in self._data])[:-1]
        parts = zip(self._data, np.split(log_ratio, ends), np.split(entropy, ends), strict=True)
        return [TokenValues(item.id, item.spans, ratios, entropies) for item, ratios, entropies in parts]


def recorders(
    updates: Sequence[Sequence[DBRecordData]], limit: int, device: torch.device
) -> list[TokenRecorder]:
    """Return a recorder for each update's data, for at most ``limit`` tokens of the step; none for 0."""
    if limit <= 0:
        return []
    chosen = choose_trajectories([item for data in updates for item in data], limit)
    return [TokenRecorder(data, chosen, device) for data in updates]


def choose_trajectories(data: Sequence[DBRecordData], limit: int) -> frozenset[str]:
    """Return the ids of the first trajectories whose trainable tokens fit into ``limit`` together."""
    chosen, left = [], limit
    for item in data:
        if item.trainable_tokens <= left:
            chosen.append(item.id)
            left -= item.trainable_tokens
    return frozenset(chosen)
