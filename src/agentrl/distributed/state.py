"""The whole weights of a model that several processes hold: gathered a tensor at a time, on rank 0's CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.model.load import Policy
from agentrl.model.lora import Adapter
from agentrl.weights.sharded_writer import FILE_BYTES, Part, model_parts, write_files


@dataclass(frozen=True)
class Place:
    """Where a tensor of the policy is, and what it looks like."""

    holder: int
    """The lowest rank that holds a part of it: 0, or the first of another stage of layers."""
    like: Tensor
    """On the meta device."""


@dataclass(frozen=True)
class Inventory:
    """The tensors of a policy that engines load, over all stages of layers; made by ``take_inventory``."""

    policy: Policy
    places: Mapping[str, Place]
    """By name, in the same order on every process."""

    def parts(self) -> list[Part]:
        """All tensors in order; those of other stages are received by rank 0 when they are asked for."""
        own = {part.name: part for part in published_parts(self.policy)}
        return [
            own.get(name) or Part(name, place.like, partial(self._receive, place))
            for name, place in self.places.items()
        ]

    def fetch(self, part: Part) -> Tensor:
        """The whole of ``part``: on rank 0's CPU, elsewhere of no use; all processes call it in one order."""
        rank, holder = dist.get_rank(), self.places[part.name].holder
        full = gather(part.make())
        if rank == holder > 0:
            dist.send(full.contiguous(), dst=0)
        return full

    def _receive(self, place: Place) -> Tensor:
        if dist.get_rank() > 0:
            return place.like
        room = torch.empty_like(place.like, device=self.policy.model.device)
        dist.recv(room, src=place.holder)
        return room


def take_inventory(policy: Policy) -> Inventory:
    """What every process holds of the policy; all processes call it."""
    own = {part.name: (part.like.shape, part.like.dtype) for part in published_parts(policy)}
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, own)
    places: dict[str, Place] = {}
    for rank, names in enumerate(held):
        for name, (shape, dtype) in names.items():
            if name not in places:
                places[name] = Place(rank, torch.empty(shape, dtype=dtype, device="meta"))
    return Inventory(policy, places)


def published_parts(policy: Policy) -> Iterator[Part]:
    """The tensors that engines load, of which this process holds a part."""
    return model_parts(policy.model) if policy.adapter is None else policy.adapter.merged.parts()


def gather(tensor: Tensor) -> Tensor:
    """The whole of ``tensor``: on rank 0's CPU, elsewhere on the device; all that hold a part call it."""
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return full.cpu() if dist.get_rank() == 0 else full


def gather_adapter(adapter: Adapter) -> dict[str, Tensor]:
    """The adapters' whole weights, as ``Adapter.write`` takes them on rank 0; all processes call it."""
    return {name: gather(tensor) for name, tensor in adapter.weights().items()}


def give_parts(inventory: Inventory, parts: Iterable[Part] | None = None) -> None:
    """On every process but rank 0: take part in gathering each tensor, or those that are left."""
    for part in inventory.parts() if parts is None else parts:
        inventory.fetch(part)


@dataclass(frozen=True)
class StreamedModel:
    """A SavableModel of rank 0 whose weights are gathered while they are written, a file at a time."""

    inventory: Inventory
    begin: Callable[[], None]
    """Has the other processes call ``give_parts``."""
    limit: int = FILE_BYTES

    def save_pretrained(self, save_directory: str) -> None:
        """Write config, safetensors and their index; what fails here fails after all has been gathered."""
        parts = self.inventory.parts()
        pending = iter(parts)
        self.begin()
        try:
            write_files(
                self.inventory.policy.model,
                Path(save_directory),
                parts,
                lambda _: self.inventory.fetch(next(pending)),
                self.limit,
            )
        finally:
            give_parts(self.inventory, pending)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors; tied tensors once."""
        return ((part.name, part.like) for part in self.inventory.parts())


@dataclass(frozen=True)
class GatheredAdapter:
    """A SavableModel of rank 0: the adapter alone, which is small."""

    adapter: Adapter
    begin: Callable[[], None]
    """Has the other processes call ``gather_adapter``."""

    def save_pretrained(self, save_directory: str) -> None:
        """Write peft's files."""
        self.begin()
        self.adapter.write(save_directory, gather_adapter(self.adapter))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters' own parameters."""
        return self.adapter.named_parameters()
