"""Record the log-ratio and the entropy of the tokens that a step trains, trajectory by trajectory.

The loss has both values of every micro-batch already. They are copied into one array per update, which all
ranks have in the same order. The sum of these arrays is complete: each token is trained by one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.data.forest import TokenForest
from agentrl.distributed.mesh import Mesh
from agentrl.documents.training import DBRecordData, TrainableSpan


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
        here, places, behavior = (
            torch.from_numpy(array).to(self._values.device)
            for array in (chosen, first[chosen] + forest.label[chosen], forest.behavior_logprob[chosen])
        )
        log_ratio = logprobs.detach().float()[here] - behavior
        self._values[:, places] = torch.stack([log_ratio, entropy.detach().float()[here]])

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
