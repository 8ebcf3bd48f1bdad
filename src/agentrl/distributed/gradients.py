"""Gradients of parameters that are split in different ways: completed, measured and clipped as one vector."""

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
    """Say that each tensor-parallel process computes only its part of the gradients of ``module``."""
    setattr(module, _PARTIAL, True)


def sum_partial_gradients(model: nn.Module, group: ProcessGroup) -> None:
    """Add up, over the tensor-parallel ``group``, the gradients of modules that ``mark_partial`` marked."""
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
    elsewhere: nn.Parameter | None = None,
) -> float:
    """Scale all gradients in place so that their norm is at most ``max_norm``; returns the norm before.

    The norm is that of the whole model's gradient: every number counts once, however many processes hold it.
    ``stages`` hold other parameters each, apart from ``elsewhere``, which another one counts.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    counted = [grad for grad, parameter in zip(gradients, trained, strict=True) if parameter is not elsewhere]
    norm = gradient_norm(counted, stages)
    coefficient = max_norm / (norm + 1e-6)
    if gradients and math.isfinite(coefficient) and coefficient < 1.0:
        torch._foreach_mul_([_local(gradient) for gradient in gradients], coefficient)
    return norm


def gradient_norm(gradients: Sequence[Tensor], stages: ProcessGroup | None = None) -> float:
    """The 2-norm of tensors of which some are split over meshes; the same on every process.

    Each process of ``stages`` brings others.
    """
    buckets: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        split = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else ()
        buckets[split].append(_local(gradient))
    total = 0.0
    for split, tensors in buckets.items():
        norms = torch.stack(torch._foreach_norm(tensors)).double()
        square = norms.square().sum()
        if split:
            mesh, placements = split
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(square, dist.ReduceOp.SUM, mesh.get_group(dimension))
        total += float(square)
    if stages is not None:
        whole = torch.tensor(total, dtype=torch.float64, device=gradients[0].device)
        dist.all_reduce(whole, dist.ReduceOp.SUM, stages)
        total = float(whole)
    return math.sqrt(total) if total >= 0 else math.nan


def split_by_mesh(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Optimizer parameter groups, each of one mesh: fused and foreach kernels take no mixture."""
    made: list[dict[str, Any]] = []
    for group in groups:
        by_mesh: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            by_mesh[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
        made += [{**group, "params": members} for members in by_mesh.values()]
    return made


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
