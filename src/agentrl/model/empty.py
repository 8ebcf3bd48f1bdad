"""Models on the meta device, which have shapes and no storage, and what gives them storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_empty(model: Any) -> bool:
    """Return whether ``model`` is on the meta device: it has no weights yet."""
    return bool(model.get_input_embeddings().weight.device.type == "meta")


@contextmanager
def placeholders(model: nn.Module) -> Iterator[None]:
    """Let the weights of an empty ``model`` look like weights on the CPU, one number each, in this block.

    What is added to the model in the block gets storage: adapters are created beside weights on the CPU.
    """
    slots = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    standing_in = {
        weight: nn.Parameter(torch.zeros(1, dtype=weight.dtype).expand(weight.shape), weight.requires_grad)
        for _, _, weight in slots
    }
    for module, name, weight in slots:
        setattr(module, name, standing_in[weight])
    try:
        yield
    finally:
        for module, name, weight in slots:
            setattr(module, name, weight.requires_grad_(standing_in[weight].requires_grad))


def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace every tensor of ``model`` on the meta device by one on ``device`` with undefined values.

    Of a DTensor each rank allocates its own part. Tied weights stay tied, and other tensors as they are.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False, remove_duplicate=False):
            if value.is_meta and id(value) not in made:
                made[id(value)] = nn.Parameter(torch.empty_like(value, device=device), value.requires_grad)
            if value.is_meta:
                setattr(module, name, made[id(value)])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta and id(buffer) not in made:
                made[id(buffer)] = torch.empty_like(buffer, device=device)
            if buffer.is_meta:
                setattr(module, name, made[id(buffer)])


def compute_buffers(model: Any, loaded: Iterable[Tensor]) -> None:
    """Compute the tensors that no checkpoint has, such as rotary frequencies, as ``from_pretrained`` does.

    Parameters, and the tensors of ``loaded``, keep their values.
    """
    for tensor in (*model.parameters(), *loaded):
        tensor._is_hf_initialized = True
    model.initialize_weights()
