"""A critic beside the policy (PPO): its values become advantages, and what they should have been trains it.

A step first asks the critic, as the step begins, for the value before each trained token, and turns these
into advantages (``data.gae``), whatever the updates of the step change. Then each update trains the critic
beside the policy, by an optimizer of its own: neither's learning rate, clipping or moments depend on the
other's gradient. Nothing of the critic is published.

Why does the gradient of a head not reach the policy's hidden states? An engine samples with the policy's
weights, and the loss of values would move them too, by as much as it is large at the beginning. A head reads
what the policy knows; a critic that should know more is a model of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from agentrl.config.schema import CriticConfig
from agentrl.data.forest import Floats, Ints, TokenForest
from agentrl.data.gae import Doubles, estimate
from agentrl.data.stream import whitened
from agentrl.distributed.fsdp import clip_gradients, sum_partial_gradients
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.training import DBRecordData
from agentrl.losses.value import value_losses
from agentrl.model.flops import Stopwatch
from agentrl.model.logprobs import ForwardOptions

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ValueLoss:
    """The critic's loss of one update, one forest at a time: the mean over its tokens that have a target."""

    count: float
    """Tokens with a target, of all ranks."""
    clip: float
    sums: list[Tensor] = field(default_factory=list)
    """float64[2] of each forest: its part of the loss, and its clipped tokens."""

    @classmethod
    def start(
        cls, forests: Sequence[TokenForest], mesh: Mesh, device: torch.device, clip: float
    ) -> ValueLoss:
        """Count the tokens of all ranks; ``forests`` are this rank's."""
        own = sum(int((~np.isnan(targets_of(forest))).sum()) for forest in forests)
        count = mesh.sum(torch.tensor(own, dtype=torch.float64, device=device))
        return cls(max(float(count), 1.0), clip)

    def add(self, forest: TokenForest, values: Tensor) -> Tensor:
        """Return the part of the loss that ``forest`` has, with gradient to its ``values`` (float32[T])."""
        start, target = (
            torch.from_numpy(array).to(values.device) for array in (forest.start_value, targets_of(forest))
        )
        losses, is_clipped = value_losses(values, start, target, self.clip)
        part = losses.sum() / self.count
        self.sums.append(torch.stack([part.detach().double(), is_clipped.double().sum()]))
        return part

    def report(self, mesh: Mesh) -> dict[str, float]:
        """Return the metrics of all ranks; waits for the device."""
        loss, clipped = mesh.sum(torch.stack(self.sums).sum(0)).tolist()
        return {"value_loss": loss, "value_clipped_fraction": clipped / self.count}


def targets_of(forest: TokenForest) -> Floats:
    """Return a forest's targets, float32[T]. Raises ValueError for one without."""
    if forest.value_target is None:
        raise ValueError("the forest has no targets of a critic")
    return forest.value_target


@dataclass(frozen=True, kw_only=True)
class Critic:
    """One rank's critic. Every rank calls the same methods."""

    config: CriticConfig
    head: nn.Module
    """float32, whole and equal on every rank."""
    trunk: ParallelModel | None
    """Makes the hidden states that the head reads; None: the policy does."""
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    whitens: bool
    """Whether advantages are whitened over the step's tokens."""
    max_grad_norm: float

    @property
    def is_warming_up(self) -> bool:
        """Whether the policy is not trained yet; the schedule counts the steps."""
        return int(self.scheduler.last_epoch) < self.config.critic_warmup_steps

    @cached_property
    def module(self) -> nn.Module:
        """All of its parameters, as a checkpoint names them."""
        return critic_module(self.head, self.trunk)

    def trained_weights(self) -> dict[str, Tensor]:
        """Return its trained weights by name; a checkpoint stores them."""
        return {name: item for name, item in self.module.named_parameters() if item.requires_grad}

    def attach(
        self,
        policy: ParallelModel,
        updates: Sequence[Sequence[TokenForest]],
        data: Sequence[Sequence[DBRecordData]],
    ) -> tuple[list[list[TokenForest]], dict[str, float]]:
        """Return a step's forests with advantages, values and targets, and what the values explain.

        ``updates`` are this rank's forests of each update, ``data`` the update's trajectories, of all ranks,
        in the order in which its forests number them. Values are those of the present weights.
        """
        values = [self._values(policy, *pair) for pair in zip(updates, data, strict=True)]
        if not all(np.isfinite(each).all() for each in values):
            # Spoil all of the step, which is then skipped: no advantage is as it would be.
            values = [np.full_like(each, np.nan) for each in values]
        advantages, targets = [], []
        for items, whole in zip(data, values, strict=True):
            ends = np.cumsum([item.trainable_tokens for item in items], dtype=np.int64)[:-1]
            found = [
                estimate(
                    item, own, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda,
                    over=self.config.gae_over,
                )
                for item, own in zip(items, np.split(whole, ends), strict=True)
            ]  # fmt: skip
            advantages.append(np.concatenate([item.advantage for item in found]))
            targets.append(np.concatenate([item.target for item in found]))
        finished = self._finished(advantages, data)
        attached = [
            [_with_values(forest, items, *columns) for forest in forests]
            for forests, items, *columns in zip(updates, data, finished, values, targets, strict=True)
        ]
        return attached, explained(np.concatenate(values), np.concatenate(targets))

    @torch.no_grad()
    def _values(
        self, policy: ParallelModel, forests: Sequence[TokenForest], data: Sequence[DBRecordData]
    ) -> Doubles:
        """Return float64, the values of an update's trainable tokens over all ranks, by trajectory."""
        first, total = _first_of(data)
        device = policy.model.device
        whole = torch.zeros(total, device=device)
        model = policy if self.trunk is None else self.trunk
        # Let a model of its own route freely: the experts of the policy are not its.
        asked = forests if self.trunk is None else [replace(item, routing=None) for item in forests]
        for forest, values in zip(forests, model.values(asked, self.head), strict=True):
            whole[torch.from_numpy(_places(forest, first)).to(device)] = values
        found: Doubles = policy.mesh.sum(whole).double().cpu().numpy()
        return found

    def _finished(
        self, advantages: Sequence[Doubles], data: Sequence[Sequence[DBRecordData]]
    ) -> list[Doubles]:
        """Return each update's advantages, whitened over the step; those of faulty calls are at most 0."""
        whole, sizes = np.concatenate(advantages), [len(part) for part in advantages]
        if self.whitens and np.isfinite(whole).all():
            whole = np.array(whitened(whole.tolist(), [1] * len(whole)))
        is_faulty = np.concatenate(
            [np.zeros(0, np.bool_)]
            + [
                np.full(span.end - span.start, span.call in item.faulty_calls)
                for items in data for item in items for span in item.spans
            ]
        )  # fmt: skip
        # Cap last: whitening may raise an advantage above 0.
        whole = np.where(is_faulty, np.minimum(whole, 0.0), whole)
        return np.split(whole, np.cumsum(sizes)[:-1])

    def options(self, options: ForwardOptions) -> ForwardOptions:
        """Return ``options`` of the policy's forward; with values, if its hidden states make them."""
        return options if self.trunk is not None else replace(options, value_head=self.head)

    def train_own_model(self, forests: Sequence[TokenForest], loss: ValueLoss, watch: Stopwatch) -> None:
        """Add the gradients of the critic's own model, if it has one, one micro-batch at a time."""
        if self.trunk is None:
            return
        options = ForwardOptions(value_head=self.head, values_alone=True)
        # Set it for recomputation: transformers recomputes layers in training mode alone. Dropout is 0.
        self.trunk.train()
        free = [replace(forest, routing=None) for forest in forests]
        for forest, (values,) in self.trunk.micro_batches(free, options, watch):
            part = loss.add(forest, values)
            watch.lap("forward")
            torch.autograd.backward(part)
            watch.lap("backward")

    def clip_gradients(self, mesh: Mesh) -> float:
        """Complete the gradients and clip them by their joint norm; return the norm before."""
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                # Sum by hand what FSDP2 sums for models: a head is too small to be sharded.
                parameter.grad = mesh.sum(parameter.grad, tokens=True)
        if self.trunk is not None and mesh.layout.tp > 1:
            sum_partial_gradients(self.trunk, mesh.group("tp"))
        return clip_gradients(self.module.parameters(), self.max_grad_norm)


def critic_module(head: nn.Module, trunk: ParallelModel | None) -> nn.Module:
    """Return the parts of a critic as one module: its optimizer and its checkpoint are of all of them."""
    return nn.ModuleDict({"head": head, **({} if trunk is None else {"trunk": trunk.model})})


def explained(values: Doubles, targets: Doubles) -> dict[str, float]:
    """Return ``explained_variance``, 1 − Var(R − V) / Var(R) over tokens with a target, and ``value_mean``.

    1: the values are the returns; 0: a constant would explain as much; below 0: a constant explains more.
    Without it where all returns are equal.
    """
    is_taught = ~np.isnan(targets)
    values, targets = values[is_taught], targets[is_taught]
    if not len(targets):
        return {}
    variance, rest = float(targets.var()), float((targets - values).var())
    found = {} if variance == 0 else {"explained_variance": 1 - rest / variance}
    return {**found, "value_mean": float(values.mean())}


def _with_values(
    forest: TokenForest, data: Sequence[DBRecordData], advantage: Doubles, value: Doubles, target: Doubles
) -> TokenForest:
    places = _places(forest, _first_of(data)[0])
    own: list[Floats] = [column[places].astype(np.float32) for column in (advantage, value, target)]
    return replace(forest, advantage=own[0], start_value=own[1], value_target=own[2])


def _first_of(data: Sequence[DBRecordData]) -> tuple[Ints, int]:
    """Return int64[trajectories], where the tokens of each begin in those of all, and how many these are."""
    sizes = np.array([item.trainable_tokens for item in data], np.int64)
    return np.cumsum(sizes) - sizes, int(sizes.sum())


def _places(forest: TokenForest, first: Ints) -> Ints:
    """Return int64[T], the place of each trainable token of ``forest`` among those of its update."""
    places: Ints = first[forest.trajectory[forest.row]] + forest.label
    return places
