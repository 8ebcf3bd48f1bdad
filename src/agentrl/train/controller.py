"""Rank 0 decides what is computed and gathers what it writes; every rank executes its commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.distributed.world import World
from agentrl.documents.images import Image
from agentrl.documents.training import DBRecordData
from agentrl.model.load import Policy
from agentrl.model.lora import Adapter
from agentrl.train.offload import to_device, to_host
from agentrl.train.step import PolicyTrainer, StepResult
from agentrl.weights.model_folder import SavableModel
from agentrl.weights.sharded_writer import FILE_BYTES, Part


@dataclass(frozen=True)
class Controller:
    """Runs the PolicyTrainers of all ranks from rank 0. A single process broadcasts to nobody."""

    trainer: PolicyTrainer
    """This rank's."""
    world: World
    inventory: Inventory

    @property
    def policy(self) -> Policy:
        """The model, of which this rank holds a part, and its tokenizer's folder."""
        return self.trainer.policy

    def train(
        self, data: Sequence[DBRecordData], ages: Mapping[int, int] | None, images: Mapping[str, Image]
    ) -> StepResult:
        """Run ``PolicyTrainer.train`` on all ranks."""
        self._broadcast("train", tuple(data), ages, images)
        return self.trainer.train(data, ages, images)

    def to_host(self) -> None:
        """Move weights and moments to the host's memory on all ranks."""
        self._broadcast("to_host")
        to_host(self.trainer)

    def to_device(self) -> None:
        """Move weights and moments to the device on all ranks."""
        self._broadcast("to_device")
        to_device(self.trainer, self.world.device)

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimizer's state and the weights that publication rounds; each rank writes its part."""
        self._broadcast("save_optimizer", folder)
        self.trainer.save_optimizer(folder)

    def published(self) -> SavableModel:
        """Return the whole weights, as engines load them; they are gathered while they are written."""
        if self._holds_all:
            return self.policy.published
        return GatheredModel(self.inventory, partial(self._broadcast, "send_weights"))

    def kept(self) -> SavableModel:
        """Return what a checkpoint holds of the model: all weights, or the adapter alone."""
        if self.policy.adapter is None:
            return self.published()
        if self._holds_all:
            return self.policy.adapter
        return GatheredAdapter(self.policy.adapter, partial(self._broadcast, "send_adapter"))

    def end(self) -> None:
        """Let the other ranks return from ``follow``."""
        self._broadcast("end")

    @property
    def _holds_all(self) -> bool:
        """Whether this process has the whole model; a pipeline stage has its layers alone."""
        return self.world.size == 1 and not self.trainer.model.is_sharded

    def _broadcast(self, name: str, *arguments: Any) -> None:
        self.world.use_device()
        self.world.broadcast(name, *arguments)


def lead(world: World, build: Callable[..., PolicyTrainer], *arguments: Any) -> Controller:
    """Call ``build(*arguments)`` on all ranks, and return the controller; for rank 0."""
    world.use_device()
    world.broadcast("build", *arguments)
    trainer = build(*arguments)
    return Controller(trainer, world, take_inventory(trainer.policy))


def follow(world: World, build: Callable[..., PolicyTrainer]) -> None:
    """Execute rank 0's commands until ``end``; for every other rank. The first command is ``build``."""
    world.use_device()
    trainer = build(*world.receive()[1])
    inventory = take_inventory(trainer.policy)
    actions: dict[str, Callable[..., object]] = {
        "train": trainer.train,
        "to_host": partial(to_host, trainer),
        "to_device": partial(to_device, trainer, world.device),
        "save_optimizer": trainer.save_optimizer,
        "send_weights": inventory.send,
    }
    if trainer.policy.adapter is not None:
        actions["send_adapter"] = partial(gather_adapter, trainer.policy.adapter)
    name, arguments = world.receive()
    while name != "end":
        actions[name](*arguments)
        name, arguments = world.receive()


@dataclass(frozen=True)
class Holding:
    """Where a tensor of the policy is, and its shape and dtype."""

    holder: int
    """The lowest rank that holds a part of it: 0, or the first rank of another stage of layers."""
    like: Tensor
    """A tensor on the meta device."""


@dataclass(frozen=True)
class Inventory:
    """The tensors of a policy that engines load, over all stages of layers; see ``take_inventory``."""

    policy: Policy
    holdings: Mapping[str, Holding]
    """By name, in the same order on every rank."""

    def parts(self) -> list[Part]:
        """Return all tensors in order. Rank 0 receives those of other stages when they are made."""
        own = {part.name: part for part in self.policy.published.parts()}
        return [
            own.get(name) or Part(name, holding.like, partial(self._receive, holding))
            for name, holding in self.holdings.items()
        ]

    def gather(self, part: Part) -> Tensor:
        """Return the whole of ``part`` on rank 0's CPU; other ranks ignore the result.

        Every rank calls it for the same parts in the same order.
        """
        rank, holder = dist.get_rank(), self.holdings[part.name].holder
        full = _gather(part.make())
        if rank == holder > 0:
            dist.send(full.contiguous(), dst=0)
        return full

    def send(self, parts: Iterable[Part] | None = None) -> None:
        """Take part in gathering all tensors, or ``parts``, on every rank but 0."""
        for part in self.parts() if parts is None else parts:
            self.gather(part)

    def _receive(self, holding: Holding) -> Tensor:
        if dist.get_rank() > 0:
            return holding.like
        received = torch.empty_like(holding.like, device=self.policy.model.device)
        dist.recv(received, src=holding.holder)
        return received


def take_inventory(policy: Policy) -> Inventory:
    """Exchange which rank holds which tensor of the policy; every rank calls it."""
    own = {part.name: (part.like.shape, part.like.dtype) for part in policy.published.parts()}
    held: list[Any] = [own]
    if dist.is_initialized():
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, own)
    holdings: dict[str, Holding] = {}
    for rank, names in enumerate(held):
        for name, (shape, dtype) in names.items():
            if name not in holdings:
                holdings[name] = Holding(rank, torch.empty(shape, dtype=dtype, device="meta"))
    return Inventory(policy, holdings)


def gather_adapter(adapter: Adapter) -> dict[str, Tensor]:
    """Return the adapter's whole weights on rank 0, as ``Adapter.write`` takes them; every rank calls it."""
    return {name: _gather(tensor) for name, tensor in adapter.weights().items()}


def _gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on rank 0 on the CPU; every rank that holds a part calls it."""
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return full.cpu() if dist.get_rank() == 0 else full


@dataclass(frozen=True)
class GatheredModel:
    """A SavableModel on rank 0 whose weights are gathered while they are written, one file at a time."""

    inventory: Inventory
    begin: Callable[[], None]
    """Makes the other ranks call ``Inventory.send``."""
    limit: int = FILE_BYTES

    def save_pretrained(self, save_directory: str) -> None:
        """Write config, safetensors and their index. An error leaves this after everything was gathered."""
        parts = self.inventory.parts()
        pending = iter(parts)
        self.begin()
        try:
            self.inventory.policy.published.write(
                Path(save_directory),
                parts,
                lambda _: self.inventory.gather(next(pending)),
                self.limit,
            )
        finally:
            self.inventory.send(pending)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return names and tensors; tied tensors once."""
        return ((part.name, part.like) for part in self.inventory.parts())


@dataclass(frozen=True)
class GatheredAdapter:
    """A SavableModel on rank 0: the adapter alone, which is small enough to be gathered at once."""

    adapter: Adapter
    begin: Callable[[], None]
    """Makes the other ranks call ``gather_adapter``."""

    def save_pretrained(self, save_directory: str) -> None:
        """Write peft's files."""
        self.begin()
        self.adapter.write(save_directory, gather_adapter(self.adapter))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the adapter's own parameters."""
        return self.adapter.named_parameters()
