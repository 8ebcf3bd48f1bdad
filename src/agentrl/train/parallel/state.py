"""The whole weights of a model that several processes hold: gathered a tensor at a time, on rank 0's CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class _Sent:
    """A tensor of which rank 0 holds no part: another stage's layer."""

    rank: int
    """The first that holds one."""
    shape: torch.Size
    dtype: torch.dtype


def gather_weights(model: Any) -> dict[str, Tensor]:
    """The state dict of the whole model on the CPU of rank 0, and nothing elsewhere; all processes call it.

    One tensor at a time is whole on a device.
    """
    whole: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    rank = dist.get_rank()
    sent = _sent_to_leader(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        twin = seen.setdefault(id(tensor), name)
        if twin == name or name in sent:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank == 0:
                whole[name] = full.detach().cpu()
            elif name in sent and sent[name].rank == rank:
                dist.send(full.detach().contiguous(), dst=0)
        elif rank == 0:
            whole[name] = whole[twin]
    for name, item in sent.items() if rank == 0 else ():
        room = torch.empty(item.shape, dtype=item.dtype, device=model.device)
        dist.recv(room, src=item.rank)
        whole[name] = room.cpu()
    return whole


def _sent_to_leader(model: Any) -> dict[str, _Sent]:
    """By name, in the order in which rank 0 receives them."""
    rank = dist.get_rank()
    own = {name: _Sent(rank, tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, own)
    first: dict[str, _Sent] = {}
    for items in held:
        first |= {name: item for name, item in items.items() if name not in first}
    return {name: item for name, item in first.items() if item.rank > 0}
