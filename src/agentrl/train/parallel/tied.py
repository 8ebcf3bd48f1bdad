"""An embedding that is also the output head, where a pipeline's first stage and its last both hold it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from agentrl.train.parallel.stages import tied_weight


def sum_tied_gradients(model: Any, stages: ProcessGroup) -> nn.Parameter | None:
    """Add to the gradient of a tied embedding that of its other copy; every stage calls it.

    Both get the same sum bit by bit, and so stay equal. Returns the parameter that the gradient's norm must
    not count here, since the first stage does.
    """
    stage, last = dist.get_rank(stages), dist.get_world_size(stages) - 1
    weight = tied_weight(model)
    if stage not in (0, last) or weight is None or not weight.requires_grad:
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    own = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
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
