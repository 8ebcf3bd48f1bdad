"""Run code as one rank of many with fake tensors and collectives: no GPU, no memory, no other process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from transformers.integrations import moe

from agentrl.distributed.expert_parallel import Dispatch, Routes
from agentrl.distributed.mesh import DIMENSIONS, Layout, Mesh, build_mesh
from agentrl.plan.memory_tracker import MemoryTracker


def rank_of(layout: Layout, stage: int) -> int:
    """Return the first rank of pipeline ``stage``: FSDP2 gives it the largest shard."""
    return stage * (layout.world // layout.sizes[DIMENSIONS.index("pp")])


@contextmanager
def fake_rank(layout: Layout, rank: int) -> Iterator[tuple[Mesh, MemoryTracker]]:
    """Yield the mesh of ``rank`` and the tracker of the fake tensors that the block makes.

    Collectives return at once, with tensors of the right shape. Experts get equally many tokens each. The
    process must not have joined a process group.
    """
    tracker = MemoryTracker()
    with ExitStack() as stack:
        if layout.world > 1:
            stack.enter_context(_fake_group(layout.world, rank))
        mesh = build_mesh(layout, "cpu")
        stack.enter_context(mock.patch.object(DeviceMesh, "__init__", _outside_fakes(DeviceMesh.__init__)))
        stack.enter_context(mock.patch.object(Dispatch, "plan", _balanced_routes))
        stack.enter_context(_uncounted_shapes(tracker))
        stack.enter_context(mock.patch.object(moe, "_can_use_grouped_mm", _is_bfloat16))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(tracker)
        stack.enter_context(tracker.resizing())
        yield mesh, tracker


@contextmanager
def _fake_group(world: int, rank: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _outside_fakes(build: Any) -> Any:
    """Wrap ``DeviceMesh.__init__``, which reads the values of tensors that it makes."""

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            build(*args, **kwargs)

    return built


def _uncounted_shapes(tracker: MemoryTracker) -> Any:
    """Do not count the fake tensors, as large as the whole, by which DTensor finds the shapes of results."""
    infer: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    @functools.wraps(infer)
    def inferred(*args: Any) -> Any:
        with tracker.paused():
            return infer(*args)

    return mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", inferred)


def _balanced_routes(dispatch: Dispatch, index: Tensor) -> Routes:
    """Return routes of ``index`` int64[T, k] on which every rank and every expert gets equally many rows."""
    ep, tp = dispatch.devices.shape
    rows = -(-index.numel() // (ep * tp))
    pairs = torch.empty(rows * ep, dtype=torch.int64, device=index.device)
    return Routes(pairs, [rows] * ep, [rows] * ep, torch.empty_like(pairs))


def _is_bfloat16(rows: Tensor, weight: Tensor, offs: Tensor) -> bool:
    """Choose transformers' own product of grouped rows for other dtypes, which torch's fake one refuses."""
    return weight.dtype == torch.bfloat16
