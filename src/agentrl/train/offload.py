"""Move what a trainer keeps on its device to the host's memory and back, while an engine has the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.device_lease import return_freed_memory

if TYPE_CHECKING:
    from agentrl.train.step import PolicyTrainer


def to_host(trainer: PolicyTrainer) -> None:
    """Move weights and moments to pinned memory, and give the device's memory back; between two steps only.

    On a CPU nothing moves: the memory that the step has freed is given back.
    """
    _move(trainer, torch.device("cpu"))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return_freed_memory()


def to_device(trainer: PolicyTrainer, device: torch.device) -> None:
    """Move weights and moments back to ``device``."""
    _move(trainer, device)


def _move(trainer: PolicyTrainer, device: torch.device) -> None:
    """Move all tensors; parameters stay the same objects, sharded or not.

    ``Module._apply`` is what ``Module.to`` calls. FSDP2 frees gathered weights there, and keeps its
    references to the shards right.
    """

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device.type == device.type:
            return tensor
        to_host = device.type == "cpu"
        copy = torch.empty_like(tensor, device=device, pin_memory=to_host)
        return copy.copy_(tensor, non_blocking=True)

    reference = trainer.frozen.reference
    for model in (trainer.model, None if reference is None else reference.model):
        if model is not None:
            model._apply(moved)  # type: ignore[no-untyped-call]
    if trainer.memory.optimizer_offload:  # the moments never stay on the device
        return
    for state in trainer.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[name] = moved(value)
