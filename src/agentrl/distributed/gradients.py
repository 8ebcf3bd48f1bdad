"""Complete the gradients of parameters that are split in different ways, and clip them by one norm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

_PARTIAL = "computes_partial_gradients"


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
                dist.all_reduce(_local(parameter.grad), dist.ReduceOp.SUM, group)


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
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    counted = [grad for grad, parameter in zip(gradients, trained, strict=True) if parameter is not duplicate]
    norm = gradient_norm(counted, stages)
    coefficient = max_norm / (norm + 1e-6)
    if gradients and math.isfinite(coefficient) and coefficient < 1.0:
        torch._foreach_mul_([_local(gradient) for gradient in gradients], coefficient)
    return norm


def gradient_norm(gradients: Sequence[Tensor], stages: ProcessGroup | None = None) -> float:
    """Return the 2-norm of tensors of which some are split over meshes; it is equal on every rank.

    Each rank of ``stages`` has different tensors.
    """
    buckets: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        split = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else ()
        buckets[split].append(_local(gradient))
    if not gradients and stages is None:
        return 0.0
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
