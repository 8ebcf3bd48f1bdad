"""Run code as one rank of many with fake tensors and collectives: no GPU, no memory, no other process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.distributed.expert_parallel import Dispatch, Routes, find_experts
from agentrl.distributed.mesh import DIMENSIONS, Layout, Mesh, build_mesh


def rank_of(layout: Layout, stage: int) -> int:
    """Return the first rank of pipeline ``stage``: FSDP2 gives it the largest shard."""
    return stage * (layout.world // layout.sizes[DIMENSIONS.index("pp")])


@contextmanager
def fake_mesh(layout: Layout, rank: int, device: str = "cpu") -> Iterator[Mesh]:
    """Yield the mesh of ``rank``, whose collectives return at once with tensors of the right shape.

    The process must not have joined a process group.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    try:
        yield build_mesh(layout, device, single=True)
    finally:
        dist.destroy_process_group()
        # It holds this mesh, and takes it for one of the same shape.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


class BalancedDispatch(Dispatch):
    """Sends each rank and each expert equally many rows, whatever the router chooses."""

    def plan(self, index: Tensor) -> Routes:
        """Return routes of ``index`` int64[T, k] without reading it, and without an exchange."""
        ranks = self.ep.size()
        rows = -(-index.numel() // (ranks * self.tp.size()))
        pairs = torch.empty(rows * ranks, dtype=torch.int64, device=index.device)
        return Routes(pairs, [rows] * ranks, [rows] * ranks, torch.empty_like(pairs))


def balance_experts(model: nn.Module) -> None:
    """Use ``BalancedDispatch`` in all experts of ``model`` that ranks split."""
    for module in find_experts(model).values():
        routed: Any = getattr(module, "dispatch", None)
        if routed is not None:
            module.dispatch = BalancedDispatch(routed.ep, routed.tp, routed.count)
