"""Expert parallelism: ranks that train different data split a mixture's experts between them.

Tokens travel to the experts that the router chose, and back, by all-to-all. Tensor-parallel ranks split the
experts too; each holds whole ones.

transformers' ``AllToAllEP`` computes the same (2e-7 apart, ``scripts/bench/experts.py``). It splits the
tokens that tensor-parallel ranks share and sends each pair of a token and an expert, where this sums [T, H]
once: with 8 experts a token it sends 4.4 times the bytes for tp 2, 1.3 for ep 2 × tp 2, as many for ep 2.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from agentrl.distributed.mesh import Layout, Mesh
from agentrl.errors import ConfigError

LocalExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [R, H], local expert indices int64[R, 1], weights [R, 1]) → rows [R, H]."""


def is_experts(module: nn.Module) -> bool:
    """Return whether ``module`` holds a mixture's experts, fused over ``num_experts``, that can be split.

    The first dimension of each parameter is the number of experts, some parameters have three dimensions, no
    submodule has parameters, and ``forward`` takes tokens [T, H], experts [T, k] and weights [T, k].
    """
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    return (
        isinstance(count, int)
        and any(parameter.dim() == 3 for parameter in own)
        and all(len(parameter) == count for parameter in module.parameters())
        and len(own) == len(list(module.parameters()))
        and len(inspect.signature(module.forward).parameters) == 3
    )


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Return the experts module of each layer by name; empty for a dense model."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def check_experts(model: nn.Module, layout: Layout) -> None:
    """Raise ConfigError for ``ep`` without experts, and for experts that ``ep`` × ``tp`` does not divide."""
    kind, found, ranks = type(model).__name__, find_experts(model), layout.ep * layout.tp
    if layout.ep > 1 and not found:
        raise ConfigError(
            f"--ep_size {layout.ep}: {kind} has no experts that are fused in one parameter",
            hint="set --ep_size 1: its layers are then sharded over these processes",
        )
    for name, module in found.items():
        if module.num_experts % ranks:
            raise ConfigError(
                f"{kind} has {module.num_experts} experts in {name}, which --ep_size {layout.ep} ×"
                f" --tp_size {layout.tp} = {ranks} does not divide",
                hint="choose an --ep_size and a --tp_size whose product divides them",
            )


def shard_experts(model: nn.Module, mesh: Mesh, policy: MixedPrecisionPolicy | None = None) -> None:
    """Split the experts over (ep, tp), shard them over the remaining ranks, and dispatch tokens to them."""
    holders = mesh.sparse["ep", "tp"]._flatten("experts")
    for module in find_experts(model).values():
        _shard(module, mesh, holders, policy)


def _shard(module: Any, mesh: Mesh, holders: DeviceMesh, policy: MixedPrecisionPolicy | None) -> None:
    local = _without_weights(module)
    local.num_experts = module.num_experts // holders.size()
    module.dispatch = Dispatch(mesh.sparse["ep"], mesh.sparse["tp"], local.num_experts)

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        held = {name: parameter.to_local() for name, parameter in module.named_parameters(recurse=False)}
        dispatch: Dispatch = module.dispatch
        return dispatch(hidden, index, weights, lambda *rows: torch.func.functional_call(local, held, rows))

    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), holders, [Shard(0)], src_data_rank=None)
        setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    module.forward = forward
    if mesh.layout.uses_fsdp or policy is not None:
        shards = mesh.sparse["dp_replicate", "shard"]
        fully_shard(
            module,
            mesh=shards if mesh.layout.dp_replicate > 1 else shards["shard"],
            shard_placement_fn=partial(_even_shard, shards["shard"].size()),
            mp_policy=policy or MixedPrecisionPolicy(),
        )


def _without_weights(module: nn.Module) -> Any:
    """Return a copy of ``module`` without storage, for ``functional_call``, that shares its config object."""
    replacements: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty(0, device="meta"), parameter.requires_grad)
        for parameter in module.parameters()
    }
    config = getattr(module, "config", None)
    return copy.deepcopy(module, replacements | {id(config): config})


def _even_shard(size: int, parameter: nn.Parameter) -> Shard:
    """Choose the dimension that FSDP shards: one within an expert, if ``size`` divides it."""
    sizes = enumerate(parameter.shape)
    return Shard(next((dimension for dimension, length in sizes if dimension > 0 and length % size == 0), 0))


@dataclass(frozen=True)
class Routes:
    """The rows that one rank exchanges: one row per pair of a token and an expert chosen for it."""

    pairs: Tensor
    """int64[P]: the pairs sent, as token · k + choice, sorted by expert."""
    sent: list[int]
    """Number of rows to each rank of the ep group."""
    received: list[int]
    """Number of rows from each rank."""
    experts: Tensor
    """int64[R]: the local index of the expert for each received row."""


@dataclass(frozen=True)
class Dispatch:
    """Exchanges tokens among the ranks of (``ep``, ``tp``), each of which holds ``count`` experts.

    Rank i // count holds expert i, with (ep, tp) counted in row-major order. Ranks of tp have the same
    tokens: each sends the pairs for experts of its own tp rank, and the results are summed.
    """

    ep: DeviceMesh
    tp: DeviceMesh
    count: int

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, run: LocalExperts) -> Tensor:
        """Return Σ over k of weights · expert(hidden), [T, H].

        hidden [T, H]; index int64[T, k]; weights [T, k]. Collective: every rank takes part in every exchange,
        forward and backward, even if it receives no row.
        """
        if self.tp.size() > 1:
            hidden, weights = (_enter(tensor, self.tp) for tensor in (hidden, weights))
        routes, group = self.plan(index), self.ep.get_group()
        rows = exchange(hidden[routes.pairs // index.shape[1]], routes.sent, routes.received, group)
        rows = exchange(run_rows(run, rows, routes.experts), routes.received, routes.sent, group)
        rows = rows * weights.reshape(-1)[routes.pairs, None]
        by_pair = rows.new_zeros(index.numel(), hidden.shape[1]).index_copy_(0, routes.pairs, rows)
        result = by_pair.view(*index.shape, -1).sum(1).to(hidden.dtype)
        if self.tp.size() == 1:
            return result
        whole = DTensor.from_local(result, self.tp, [Partial()]).redistribute(placements=[Replicate()])
        return whole.to_local()

    def plan(self, index: Tensor) -> Routes:
        """Return the routes of tokens whose experts are ``index`` int64[T, k]; collective over ep.

        The host waits for the device: it needs the sizes of the exchange. With tp it waits twice.
        """
        ep, tp = self.ep.size(), self.tp.size()
        expert = index.reshape(-1)
        pairs = own_pairs(expert, self.count, tp, self.tp.get_local_rank())
        sent = _count(expert[pairs], self.count, tp, ep)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.ep.get_group())
        to_ranks, from_ranks = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        own = torch.arange(self.count, device=index.device)
        experts = own.repeat(ep).repeat_interleave(received.view(-1), output_size=sum(from_ranks))
        return Routes(pairs, to_ranks, from_ranks, experts)


def own_pairs(expert: Tensor, count: int, tp: int, tp_rank: int) -> Tensor:
    """Return int64[P], the positions in ``expert`` int64[T·k] of ``tp_rank``'s experts, sorted by expert."""
    if tp == 1:
        return expert.argsort(stable=True)
    pairs = (expert // count % tp == tp_rank).nonzero().flatten()
    return pairs[expert[pairs].argsort(stable=True)]


def _count(expert: Tensor, count: int, tp: int, ep: int) -> Tensor:
    """Return int64[ep, count], the number of rows for each rank of ep and each of its experts."""
    slot = expert // (count * tp) * count + expert % count
    counts = slot.new_zeros(ep * count)  # bincount would wait for the largest slot
    return counts.index_add_(0, slot, torch.ones_like(slot)).view(ep, count)


def run_rows(run: LocalExperts, rows: Tensor, experts: Tensor) -> Tensor:
    """Run each of ``rows`` [R, H] through its expert, int64[R].

    Without any row, runs one row of zeros and drops its result: the parameters then get zero gradients, which
    the reduction over ranks needs.
    """
    if len(rows):
        return run(rows, experts[:, None], rows.new_ones(len(rows), 1))
    # Join it to the rows, whose exchange has to run in the backward.
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return run(padded, experts.new_zeros(1, 1), padded.new_ones(1, 1))[:0]


def exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send ``sent[i]`` of ``rows`` [n, H], in order, to rank i, and return the received; with gradient."""
    if len(sent) == 1:
        return rows
    exchanged: Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Sends gradients back along the routes of the forward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.route = (sent, received, group)
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.route
        (gradient,) = gradients
        result = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(result, gradient.contiguous(), sent, received, group=group)
        return result, None, None, None


def _enter(tensor: Tensor, devices: DeviceMesh) -> Tensor:
    """Return ``tensor``, equal on all ``devices``, with a gradient that is summed over them."""
    return DTensor.from_local(tensor, devices, [Replicate()]).to_local(grad_placements=[Partial()])
