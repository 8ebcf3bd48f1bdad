"""The optimizer's state on disk in shards, which load into any number of processes and any layout."""

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
    """Write each parameter's state under the parameter's name; every process of a team calls it.

    Raises OSError where a process cannot write.
    """
    state = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    try:
        with _alone_without_warning():
            save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise _first(error) from error


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Read what ``save_optimizer`` wrote, in whatever layout; every process of a team calls it.

    Raises OSError, ValueError, KeyError or RuntimeError for files that are damaged or of another model.
    """
    state = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    try:
        with _alone_without_warning():
            load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise _first(error) from error
    set_optimizer_state_dict(model, optimizer, state, options=_OPTIONS)


@contextlib.contextmanager
def _alone_without_warning() -> Iterator[None]:
    """One process is no mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _first(error: CheckpointException) -> Exception:
    """What went wrong on the first process that failed."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, OSError):
        return cause
    return RuntimeError(f"rank {rank}: {cause}")
