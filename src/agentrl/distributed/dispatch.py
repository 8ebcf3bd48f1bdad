"""Tokens travel to the experts that they are routed to, and back: by all-to-all between processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

LocalExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows [R, H], experts int64[R, 1] counted from this process's first, weights [R, 1] → rows [R, H]."""


@dataclass(frozen=True)
class Routes:
    """Where the rows of one process go: a row for each pair of a token and an expert of its choice."""

    pairs: Tensor
    """int64[P]: the pairs sent, token · k + place, by expert."""
    sent: list[int]
    """Rows to each process of the group."""
    received: list[int]
    """Rows from each."""
    experts: Tensor
    """int64[R]: the expert of each row that comes in, counted from this process's first."""


@dataclass(frozen=True)
class Dispatch:
    """The way of tokens among the processes of ``devices`` = (ep, tp), of which each has ``count`` experts.

    Expert i is with process i // count, (ep, tp) counted row by row. Processes of tp see the same tokens, and
    each sends those that are bound for experts of its own tp rank; their results are summed.
    """

    devices: DeviceMesh
    count: int

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, run: LocalExperts) -> Tensor:
        """Σ over k of weights · expert(hidden), [T, H], for hidden [T, H], index int64[T, k], weights [T, k].

        Every process takes part in all exchanges, forward and backward, also where no row comes to it.
        """
        tensor_parallel = self.devices["tp"]
        if tensor_parallel.size() > 1:
            hidden, weights = (_enter(tensor, tensor_parallel) for tensor in (hidden, weights))
        routes, group = self.plan(index), self.devices.get_group("ep")
        rows = exchange(hidden[routes.pairs // index.shape[1]], routes.sent, routes.received, group)
        rows = exchange(run_rows(run, rows, routes.experts), routes.received, routes.sent, group)
        rows = rows * weights.reshape(-1)[routes.pairs, None]
        by_pair = rows.new_zeros(index.numel(), hidden.shape[1]).index_copy(0, routes.pairs, rows)
        result = by_pair.view(*index.shape, -1).sum(1).to(hidden.dtype)
        return _leave(result, tensor_parallel) if tensor_parallel.size() > 1 else result

    def plan(self, index: Tensor) -> Routes:
        """The routes of tokens whose experts are ``index`` int64[T, k]; the ep group exchanges counts."""
        ep, tp = self.devices.shape
        expert = index.reshape(-1)
        pairs = own_pairs(expert, self.count, tp, self.devices.get_local_rank("tp"))
        sent = _count(expert[pairs], self.count, tp, ep)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.devices.get_group("ep"))
        own = torch.arange(self.count, device=index.device)
        experts = own.repeat(ep).repeat_interleave(received.view(-1))
        return Routes(pairs, sent.sum(1).tolist(), received.sum(1).tolist(), experts)


def own_pairs(expert: Tensor, count: int, tp: int, tp_rank: int) -> Tensor:
    """int64[P]: where in ``expert`` int64[T·k] the experts of ``tp_rank`` are, by expert, else in order."""
    pairs = (expert // count % tp == tp_rank).nonzero().flatten()
    return pairs[expert[pairs].argsort(stable=True)]


def _count(expert: Tensor, count: int, tp: int, ep: int) -> Tensor:
    """int64[ep, count]: rows for each process of the group and each of its experts."""
    slot = expert // (count * tp) * count + expert % count
    return torch.bincount(slot, minlength=ep * count).view(ep, count)


def run_rows(run: LocalExperts, rows: Tensor, experts: Tensor) -> Tensor:
    """Each of ``rows`` [R, H] through its expert, int64[R].

    Without any, a row of zeros runs, whose result counts for nothing: the parameters get gradients of zeros,
    for which the other processes wait.
    """
    missing = 1 if len(rows) == 0 else 0
    padded = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    index = torch.cat([experts, experts.new_zeros(missing)])[:, None]
    return run(padded, index, padded.new_ones(index.shape))[: len(rows)]


def exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """All-to-all with gradient: the first ``sent[0]`` of ``rows`` [n, H] to the first process, and so on."""
    if len(sent) == 1:
        return rows
    exchanged: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.way = (sent, received, group)
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.way
        (gradient,) = gradients
        result = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(result, gradient.contiguous(), sent, received, group=group)
        return result, None, None, None


def _enter(tensor: Tensor, devices: DeviceMesh) -> Tensor:
    """``tensor``, equal on all of ``devices``; its gradient is the sum of theirs."""
    return DTensor.from_local(tensor, devices, [Replicate()]).to_local(grad_placements=[Partial()])


def _leave(tensor: Tensor, devices: DeviceMesh) -> Tensor:
    """The sum over ``devices``; each gets the whole gradient."""
    return DTensor.from_local(tensor, devices, [Partial()]).redistribute(placements=[Replicate()]).to_local()
