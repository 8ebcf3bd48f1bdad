"""When the gradients of a step's micro-batches are reduced over the processes (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

Reduction = Literal["last", "every"]
_BROKEN_OFF = "step_was_broken_off"


def set_reduction(root: nn.Module, reduction: Reduction, *, is_last: bool) -> None:
    """Say what the next backward does with the gradients of the modules below ``root`` that FSDP2 shards.

    ``last``: each process keeps them whole, and the backward of a step's last micro-batch reduces their sum.
    ``every``: each backward scatters them, and only copies of the model wait for the last.
    """
    for module in _sharded(root):
        module.set_requires_gradient_sync(is_last or reduction == "every", recurse=False)
        module.set_requires_all_reduce(is_last, recurse=False)


@contextlib.contextmanager
def whole_step(root: nn.Module) -> Iterator[None]:
    """A step in this block begins without what one that an exception broke off has left in ``root``.

    What was left is dropped when the next step begins, not while the exception passes: the other processes
    may be in the middle of theirs.
    """
    if getattr(root, _BROKEN_OFF, False):
        _discard(root)
    setattr(root, _BROKEN_OFF, True)
    yield
    setattr(root, _BROKEN_OFF, False)


def _discard(root: nn.Module) -> None:
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
