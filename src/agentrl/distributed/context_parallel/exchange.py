"""Context parallelism: what the processes of a group send each other, with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TokenExchange:
    """The processes that share a forest's tokens as ``chunks.TokenShare`` says; all call the same methods."""

    group: ProcessGroup

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.group.size()

    def gather(self, local: Tensor) -> Tensor:
        """[1, heads, N, d] in the forest's order, of each process's [1, heads, n, d]."""
        parts = local.new_empty(self.ranks, *local.shape[1:])
        dist.all_gather(list(parts.chunk(self.ranks)), local.contiguous(), self.group)
        early, late = parts.chunk(2, dim=2)
        return torch.cat([*early, *late.flip(0)], dim=1)[None]

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This process's [1, heads, n, d] of the sum over the processes' ``whole`` [1, heads, N, d]."""
        early, late = torch.stack(whole[0].chunk(2 * self.ranks, dim=1)).chunk(2)
        parts = torch.cat([early, late.flip(0)], dim=2)
        local = whole.new_empty(1, *parts.shape[1:])
        dist.reduce_scatter(local, list(parts.chunk(self.ranks)), dist.ReduceOp.SUM, self.group)
        return local

    def gather_with_gradient(self, *local: Tensor) -> tuple[Tensor, ...]:
        """``gather`` of each; their gradients are sums over all processes."""
        return cast("tuple[Tensor, ...]", _Gather.apply(self, *local))  # type: ignore[no-untyped-call]

    def join(self, part: Tensor, places: Tensor, count: int) -> Tensor:
        """[count], of which this process knows ``part`` at ``places`` and the others the rest.

        The gradient is that of ``part`` alone: each process computes the same loss of the whole, and goes
        back through its own part.
        """
        if count == 0:
            return part
        return cast(Tensor, _Join.apply(part, places, count, self.group))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: TokenExchange, *local: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.gather(tensor) for tensor in local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(ctx.exchange.scatter_sum(grad) for grad in grads))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, places: Tensor, count: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = part.new_zeros(count)
        whole[places] = part
        dist.all_reduce(whole, dist.ReduceOp.SUM, group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places], None, None, None
