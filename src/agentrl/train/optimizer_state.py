"""Save the optimizer's state with torch.distributed.checkpoint, and load it into any layout of ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Write the optimizer's state to ``folder``; collective. Each rank writes its shards.

    Raises OSError if a rank cannot write.
    """
    state = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    try:
        with _without_single_process_warning():
            save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise _first_failure(error) from error


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load what ``save_optimizer`` wrote, possibly with another number of ranks or layout; collective.

    Raises OSError, ValueError, KeyError or RuntimeError for damaged files or those of another model.
    """
    state = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    try:
        with _without_single_process_warning():
            load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise _first_failure(error) from error
    set_optimizer_state_dict(model, optimizer, state, options=_OPTIONS)


@contextlib.contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """Ignore torch's warning that no process group is initialized; a single process is supported."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _first_failure(error: CheckpointException) -> Exception:
    """Return the error of the lowest rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, OSError):
        return cause
    return RuntimeError(f"rank {rank}: {cause}")
