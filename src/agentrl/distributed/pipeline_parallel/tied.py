"""An embedding that is also the output head, where a pipeline's first stage and its last both hold it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from agentrl.distributed.pipeline_parallel.stages import tied_weight


def sum_tied_gradients(model: Any, stages: ProcessGroup) -> nn.Parameter | None:
    """Add to the gradient of a tied embedding that of its other copy; every stage calls it.

    Both get the same sum bit by bit, and so stay equal. Returns the parameter that the gradient's norm must
    not count here, since the first stage does.
    """
    stage, last = dist.get_rank(stages), dist.get_world_size(stages) - 1
    weight = tied_weight(model)
    if stage not in (0, last) or weight is None or not weight.requires_grad:
        return None
    own = _placed_gradient(weight)
    sent, other = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
    peer = last - stage
    operations = [
        dist.P2POp(dist.isend, sent, group=stages, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=stages, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    own.add_(other)
    return weight if stage == last else None


def _placed_gradient(weight: nn.Parameter) -> Tensor:
    """This process's part of the gradient of ``weight``, which is split as ``weight`` is from here on.

    A tensor-parallel embedding's is whole on every process.
    """
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
        gradient = gradient.redistribute(weight.device_mesh, weight.placements)
    weight.grad = gradient
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
