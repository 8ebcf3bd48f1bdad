"""Save the optimizer's state with torch.distributed.checkpoint, and load it into any layout of ranks.

The weights that publication rounds are saved with it, each rank's part by the rank itself.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_WEIGHT = "weights."


def save_optimizer(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write the optimizer's state and ``weights`` to ``folder``; collective. Each rank writes its shards.

    ``weights`` are parameters of ``model`` by name. Raises OSError if a rank cannot write.
    """
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    state |= {_WEIGHT + name: weight.detach() for name, weight in (weights or {}).items()}
    try:
        with _without_single_process_warning():
            save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise _first_failure(error) from error


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load what ``save_optimizer`` wrote, possibly with another number of ranks or layout; collective.

    Weights that were saved are copied into the parameters of ``model``.
    Raises OSError, ValueError, KeyError or RuntimeError for damaged files or those of another model.
    """
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {_WEIGHT + name: item.detach() for name, item in model.named_parameters()}
    content = state | {key: weight for key, weight in weights.items() if key in saved}
    try:
        with _without_single_process_warning():
            load(content, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise _first_failure(error) from error
    set_optimizer_state_dict(model, optimizer, {key: content[key] for key in state}, options=_OPTIONS)


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
