"""Shard a model with FSDP2, reduce and clip gradients, and recover from an aborted step.

FSDP2 also casts weights to the dtype of products (``Precision.policy``), on a mesh of one rank too.

transformers' ``DistributedConfig(fsdp_size=)`` calls the same ``fully_shard``, but cannot replace this: it
refuses pipeline stages, does not shard over context-parallel ranks, and averages gradients, which a step
with one denominator sums. Its own loading takes twice the memory (``load_shards``).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from agentrl.distributed.expert_parallel import find_experts
from agentrl.distributed.mesh import Layout, Mesh

GradientReduction = Literal["auto", "last", "every"]
_ABORTED = "step_was_aborted"
_GRADIENT_SHARE = 1 / 8
"""The part of a device's memory that whole gradients may take with ``--gradient_reduction auto``."""
_PARTIAL = "computes_partial_gradients"


def shard_layers(model: Any, mesh: Mesh, policy: MixedPrecisionPolicy | None) -> None:
    """Shard each decoder layer over ``Layout.shard``, a reward head too; replicate over ``dp_replicate``."""
    layers: Sequence[nn.Module] = model.get_decoder().layers
    for layer in layers:
        fully_shard(layer, mesh=mesh.shards, mp_policy=policy or MixedPrecisionPolicy())
    head = getattr(model, "score", None)
    if head is not None:  # a reward model's, which computes in its own float32
        fully_shard(head, mesh=mesh.shards)


def shard_root(root: nn.Module, mesh: Mesh, policy: MixedPrecisionPolicy | None) -> None:
    """Shard the parameters of ``root`` outside its layers. Gradients become sums over ranks, not means.

    They stay gathered from the forward to the backward; those of a frozen model have no backward.
    """
    is_frozen = not any(parameter.requires_grad for parameter in root.parameters())
    fully_shard(
        root, mesh=mesh.shards, mp_policy=policy or MixedPrecisionPolicy(), reshard_after_forward=is_frozen
    )
    for module in _sharded(root):
        # Force a plain sum: for a divisor of 1 torch takes PREMUL_SUM, which gloo does not have.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def choose_reduction(reduction: GradientReduction, model: nn.Module, layout: Layout) -> GradientReduction:
    """Return ``last`` or ``every`` for ``auto``: ``every``, if whole gradients need much of the device.

    ``model`` is whole. ``last`` needs fewer collectives, and until the last micro-batch each rank holds
    gradients as large as its part of the model before sharding.
    """
    if reduction != "auto":
        return reduction
    if layout.shard == 1:  # a shard is the whole, and reducing early would hold a second copy
        return "last"
    experts = {id(item) for module in find_experts(model).values() for item in module.parameters()}
    split = layout.tp * layout.pp
    whole = sum(
        parameter.nbytes // (split * layout.ep if id(parameter) in experts else split)
        for parameter in model.parameters()
        if parameter.requires_grad
    )
    return "every" if whole > _GRADIENT_SHARE * _rank_memory() else "last"


def _rank_memory() -> int:
    """Return the bytes of memory that one rank has: of its accelerator, or its part of the host's."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def set_reduction(root: nn.Module, reduction: GradientReduction, *, is_last: bool) -> None:
    """Choose what the next backward does with the gradients of sharded modules in ``root``.

    ``last``: each rank accumulates whole gradients; the last micro-batch's backward reduces their sum.
    ``every``: each backward reduces and scatters them; only replicas wait for the last micro-batch.
    """
    for module in _sharded(root):
        module.set_requires_gradient_sync(is_last or reduction == "every", recurse=False)
        module.set_requires_all_reduce(is_last, recurse=False)


@contextlib.contextmanager
def clean_step(root: nn.Module) -> Iterator[None]:
    """Clear gradients and state left in ``root`` by an aborted step, then run the block as a step.

    They are cleared when the next step begins, not while the exception passes: other ranks may still be in
    the middle of the aborted step.
    """
    if getattr(root, _ABORTED, False):
        _clear(root)
    setattr(root, _ABORTED, True)
    yield
    setattr(root, _ABORTED, False)


def _clear(root: nn.Module) -> None:
    if isinstance(root, FSDPModule):
        root.reset_iter_state()
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Gather first: gradients that are not reduced yet are those of the gathered parameters.
            module.unshard()
            module.zero_grad()
            module.reshard()
    root.zero_grad()


def _sharded(root: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def mark_partial(module: nn.Module) -> None:
    """Mark a module of which each tensor-parallel rank computes only a part of the gradients."""
    setattr(module, _PARTIAL, True)


def sum_partial_gradients(model: nn.Module, group: ProcessGroup) -> None:
    """Sum the gradients of modules that ``mark_partial`` marked over the tensor-parallel ``group``."""
    for module in model.modules():
        if not getattr(module, _PARTIAL, False):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                dist.all_reduce(local_part(parameter.grad), dist.ReduceOp.SUM, group)


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    stages: ProcessGroup | None = None,
    duplicate: nn.Parameter | None = None,
) -> float:
    """Scale all gradients in place so that their joint norm is at most ``max_norm``; return the norm before.

    Every number of the whole model's gradient counts once, however many ranks hold it. Pipeline ``stages``
    hold different parameters each, except for ``duplicate``, which another stage counts. (torch's
    ``clip_grad_norm_`` takes no DTensors of several meshes, as experts and dense layers have.)
    """
    parameters = list(parameters)
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    counted = [grad for grad, parameter in zip(gradients, trained, strict=True) if parameter is not duplicate]
    norm = gradient_norm(counted, parameters[0].device, stages)
    coefficient = max_norm / (norm + 1e-6)
    if gradients and math.isfinite(coefficient) and coefficient < 1.0:
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], coefficient)
    return norm


def gradient_norm(
    gradients: Sequence[Tensor], device: torch.device, stages: ProcessGroup | None = None
) -> float:
    """Return the 2-norm of tensors on ``device``, some split over meshes; it is equal on every rank.

    Each rank of ``stages`` has different tensors, or none: its layers may be frozen.
    """
    buckets: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        split = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else ()
        buckets[split].append(local_part(gradient))
    if not gradients and stages is None:
        return 0.0
    total = torch.zeros((), dtype=torch.float64, device=device)
    for split, tensors in buckets.items():
        norms = torch.stack(torch._foreach_norm(tensors)).double()
        square = norms.square().sum()
        if split:
            mesh, placements = split
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(square, dist.ReduceOp.SUM, mesh.get_group(dimension))
        total += square
    if stages is not None:
        dist.all_reduce(total, dist.ReduceOp.SUM, stages)
    norm_squared = float(total)
    return math.sqrt(norm_squared) if norm_squared >= 0 else math.nan


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that may be split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
