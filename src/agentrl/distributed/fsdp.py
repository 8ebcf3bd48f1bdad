"""Shard a model with FSDP2, choose when gradients are reduced, and recover from an aborted step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from agentrl.distributed.mesh import Mesh

GradientReduction = Literal["last", "every"]
_ABORTED = "step_was_aborted"


def shard_layers(model: Any, mesh: Mesh) -> None:
    """Shard each decoder layer over ``Layout.shard`` and replicate it over ``dp_replicate``."""
    layers: Sequence[nn.Module] = model.get_decoder().layers
    for layer in layers:
        fully_shard(layer, mesh=mesh.dense["dp_replicate", "shard"])


def shard_root(root: nn.Module, mesh: Mesh) -> None:
    """Shard the parameters of ``root`` outside its layers. Gradients become sums over ranks, not means."""
    fully_shard(root, mesh=mesh.dense["dp_replicate", "shard"], reshard_after_forward=False)
    for module in _sharded(root):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


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
            module.unshard()
            module.zero_grad()
            module.reshard()
    root.zero_grad()


def _sharded(root: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))
