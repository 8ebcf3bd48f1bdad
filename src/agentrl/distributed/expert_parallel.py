"""Expert parallelism: processes that train different data hold a mixture's experts between them.

The processes that compute a layer together (tensor parallelism) share experts as well, whole ones.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from agentrl.distributed.dispatch import Dispatch
from agentrl.distributed.mesh import Layout, Mesh
from agentrl.errors import ConfigError


def is_experts(module: nn.Module) -> bool:
    """True for a mixture's experts that can be shared out: parameters fused over ``num_experts``.

    Each parameter's first size is the number of experts, some have three dimensions, no submodule has any,
    and ``forward`` takes tokens [T, H], their experts [T, k] and weights [T, k].
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
    """The experts of each layer by name; none in a dense model."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def check_experts(model: nn.Module, layout: Layout) -> None:
    """Raise ConfigError for ``ep`` without experts, and for experts that ``ep`` × ``tp`` does not divide."""
    kind, found, processes = type(model).__name__, find_experts(model), layout.ep * layout.tp
    if layout.ep > 1 and not found:
        raise ConfigError(
            f"--ep_size {layout.ep}: {kind} has no experts that are fused in one parameter",
            hint="set --ep_size 1: its layers are sharded over all processes that are left",
        )
    for name, module in found.items():
        if module.num_experts % processes:
            raise ConfigError(
                f"{kind} has {module.num_experts} experts in {name}, which --ep_size {layout.ep} ×"
                f" --tp_size {layout.tp} = {processes} does not divide",
                hint="choose an --ep_size and a --tp_size whose product divides them",
            )


def share_experts(model: nn.Module, mesh: Mesh) -> None:
    """Give each process of (ep, tp) its experts, sharded over the others, and let tokens travel to them."""
    holders = mesh.sparse["ep", "tp"]._flatten("experts")
    for module in find_experts(model).values():
        _share(module, mesh, holders)


def _share(module: Any, mesh: Mesh, holders: DeviceMesh) -> None:
    dispatch = Dispatch(mesh.sparse["ep", "tp"], module.num_experts // holders.size())
    local = _without_weights(module)
    local.num_experts = dispatch.count

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        held = {name: parameter.to_local() for name, parameter in module.named_parameters(recurse=False)}
        return dispatch(hidden, index, weights, lambda *rows: torch.func.functional_call(local, held, rows))

    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), holders, [Shard(0)], src_data_rank=None)
        setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    module.forward = forward
    if mesh.layout.shard * mesh.layout.dp_replicate > 1:
        shards = mesh.sparse["dp_replicate", "shard"]
        fully_shard(module, mesh=shards, shard_placement_fn=_even_shards(shards["shard"].size()))


def _without_weights(module: nn.Module) -> Any:
    """A copy that computes the same with whatever parameters it is called with, and follows its config."""
    instead: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty(0, device="meta"), parameter.requires_grad)
        for parameter in module.parameters()
    }
    config = getattr(module, "config", None)
    return copy.deepcopy(module, instead | {id(config): config})


def _even_shards(size: int) -> Any:
    """Along which dimension FSDP splits a parameter: within each expert, where ``size`` divides it."""

    def choose(parameter: nn.Parameter) -> Shard:
        sizes = enumerate(parameter.shape)
        return Shard(next((place for place, length in sizes if place > 0 and length % size == 0), 0))

    return choose
