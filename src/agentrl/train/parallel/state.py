"""The whole weights of a model that several processes hold: gathered a tensor at a time, on rank 0's CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.train.lora import Adapter
from agentrl.train.model import Policy
from agentrl.weights.stream import FILE_BYTES, Part, model_parts, write_files


def gather_weights(model: Any) -> dict[str, Tensor]:
    """The state dict of the whole model on the CPU of rank 0, and nothing elsewhere; all processes call it.

    One tensor at a time is whole on a device.
    """
    whole: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    is_leader = dist.get_rank() == 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        twin = seen.setdefault(id(tensor), name)
        if twin == name:
            full = gather(tensor)
            if is_leader:
                whole[name] = full
        elif is_leader:
            whole[name] = whole[twin]
    return whole


def gather(tensor: Tensor) -> Tensor:
    """The whole of ``tensor``: on rank 0's CPU, elsewhere of no use; all processes call it."""
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return full.cpu() if dist.get_rank() == 0 else full


def published_parts(policy: Policy) -> Iterator[Part]:
    """The tensors that engines load, in an order that is the same on every process."""
    return model_parts(policy.model) if policy.adapter is None else policy.adapter.merged.parts()


def gather_adapter(adapter: Adapter) -> dict[str, Tensor]:
    """The adapters' whole weights, as ``Adapter.write`` takes them on rank 0; all processes call it."""
    return {name: gather(tensor) for name, tensor in adapter.weights().items()}


def give_parts(parts: Iterable[Part]) -> None:
    """On every process but rank 0: take part in gathering each of them."""
    for part in parts:
        gather(part.make())


@dataclass(frozen=True)
class StreamedModel:
    """A SavableModel of rank 0 whose weights are gathered while they are written, a file at a time."""

    policy: Policy
    begin: Callable[[], None]
    """Has the other processes call ``give_parts``."""
    limit: int = FILE_BYTES

    def save_pretrained(self, save_directory: str) -> None:
        """Write config, safetensors and their index; what fails here fails after all has been gathered."""
        parts = list(published_parts(self.policy))
        pending = iter(parts)
        self.begin()
        try:
            write_files(
                self.policy.model,
                Path(save_directory),
                parts,
                lambda _: gather(next(pending).make()),
                self.limit,
            )
        finally:
            give_parts(pending)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors; tied tensors once."""
        return ((part.name, part.like) for part in published_parts(self.policy))


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
