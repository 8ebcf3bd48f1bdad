"""The whole weights of a model that several processes hold: gathered a tensor at a time, on rank 0's CPU."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


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
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if is_leader:
                whole[name] = full.detach().cpu()
        elif is_leader:
            whole[name] = whole[twin]
    return whole
