"""Resumable checkpoints: model, optimizer, schedule, random states and the steps they contain, atomically."""

from __future__ import annotations

import json
import logging
import pickle
import random
import re
import shutil
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from agentrl.documents.status import StepStatus
from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError, ModelError
from agentrl.train.model import Policy, architecture
from agentrl.train.shards import load_optimizer
from agentrl.weights.folder import SavableModel, atomic_folder, save_model_files, weight_bytes

logger = logging.getLogger(__name__)

STATE = "state.json"
_TRAINER = "trainer.pt"
_OPTIMIZER = "optimizer"
_PREFIX = "checkpoint-"
_ADAM_COPIES = 3
_UNREADABLE = (
    OSError, KeyError, ValueError, RuntimeError, EOFError, struct.error, pickle.UnpicklingError,
)  # fmt: skip
"""What torch.load and load_state_dict raise on a file that is damaged or of something else."""


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """What a checkpoint says of itself."""

    run_name: str
    step: int
    policy_version: int
    """The newest version published when it was written; its own weights are published after it."""
    train_steps: tuple[str, ...]
    """``_id`` of every TrainStep whose effect the weights contain."""
    architecture: dict[str, Any]


class Resumable(Protocol):
    """What a checkpoint holds besides its state."""

    @property
    def policy(self) -> Policy:
        """The model, and the folder whose tokenizer goes with it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or this process's part of it."""

    @property
    def scheduler(self) -> LRScheduler:
        """The learning-rate schedule."""

    def kept(self) -> SavableModel:
        """What of the model is written: the adapter alone, where there is one."""

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimizer's state as ``shards.save_optimizer`` does."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; ``folder/model`` is a Hugging Face folder, or peft's adapter folder."""

    folder: Path
    state: CheckpointState

    @property
    def model(self) -> Path:
        """The model part."""
        return self.folder / "model"


def save(
    root: Path,
    state: CheckpointState,
    trained: Resumable,
    *,
    limit: int,
) -> Path:
    """Write ``root/checkpoint-000010`` whole, then delete all but the newest ``limit``.

    Raises PublishError, with nothing left behind, when the disk is full.
    """
    policy, kept = trained.policy, trained.kept()
    target = root / f"{_PREFIX}{state.step:06d}"
    with atomic_folder(target, weight_bytes(kept) * _ADAM_COPIES) as temporary:
        (temporary / "model").mkdir()
        save_model_files(kept, policy.base, temporary / "model", policy.chat_template)
        trained.save_optimizer(temporary / _OPTIMIZER)
        torch.save(
            {
                "scheduler": trained.scheduler.state_dict(),
                "random": _random_states(),
            },
            temporary / _TRAINER,
        )
        (temporary / STATE).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    for old in _folders(root)[:-limit]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def find(
    root: Path, choice: str | None, steps: Sequence[TrainStep], *, run_name: str, base: Path
) -> Checkpoint | None:
    """The checkpoint to resume from: for ``auto`` the newest complete one whose steps all stand, none for
    ``none``, or a folder.

    ``steps`` are all TrainSteps of the run. Raises ConfigError for a folder that is none, for one of another
    run, for one that contains steps which the database does not know, and for a named one that contains
    steps which have been undone; ModelError for another architecture than the model in ``base``.
    """
    if choice in (None, "none"):
        return None
    if choice == "auto":
        found = (_read(folder) for folder in reversed(_folders(root)))
        standing = (item for item in found if not _undone(item, run_name, steps))
        newest = next(standing, None)
        return newest and _checked(newest, base)
    folder = Path(str(choice))
    if not (folder / STATE).is_file():
        raise ConfigError(
            f"--resume_from_checkpoint {folder} is no checkpoint: it has no {STATE}",
            cure="give 'auto', 'none' or a folder checkpoint-…",
        )
    named = _read(folder)
    undone = _undone(named, run_name, steps)
    if undone:
        raise ConfigError(
            f"{folder} contains {len(undone)} steps that have been undone, {undone[0]} among them: the run"
            " went on from a checkpoint before them, and their data belong to others now",
            cure=f"start another run from its weights: --model_name_or_path {named.model}",
        )
    return _checked(named, base)


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename the checkpoints of steps above ``after``, which are undone, to ``undone-checkpoint-…``.

    They are no longer resumed from, nor counted by ``save_total_limit``. Returns their new places.
    """
    moved = []
    for folder in _folders(root):
        if int(folder.name.removeprefix(_PREFIX)) > after:
            place = folder.with_name(f"undone-{folder.name}")
            shutil.rmtree(place, ignore_errors=True)
            folder.rename(place)
            logger.warning("%s holds steps that are undone: it is %s now", folder, place.name)
            moved.append(place)
    return moved


def restore(checkpoint: Checkpoint, trained: Resumable) -> None:
    """Load optimizer, schedule and random states; the model is loaded from ``checkpoint.model``."""
    path = checkpoint.folder / _TRAINER
    try:
        load_optimizer(checkpoint.folder / _OPTIMIZER, trained.policy.model, trained.optimizer)
        content = torch.load(path, map_location="cpu", weights_only=True)
        trained.scheduler.load_state_dict(content["scheduler"])
        _restore_random_states(content["random"])
    except _UNREADABLE as error:
        raise ModelError(
            f"{checkpoint.folder} cannot be restored: {error}",
            cure="resume from another checkpoint, or start with 'none'",
        ) from error


def _folders(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first: a temporary folder has another name until it is whole."""
    if not root.is_dir():
        return []
    found = (path for path in root.iterdir() if re.fullmatch(rf"{_PREFIX}\d+", path.name))
    return sorted((path for path in found if (path / STATE).is_file()), key=lambda path: path.name)


def _read(folder: Path) -> Checkpoint:
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        values = {item.name: content[item.name] for item in fields(CheckpointState)}
        state = CheckpointState(**{**values, "train_steps": tuple(content["train_steps"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / STATE} cannot be read: {error}", cure="use another checkpoint"
        ) from error
    return Checkpoint(folder, state)


def _undone(checkpoint: Checkpoint, run_name: str, steps: Sequence[TrainStep]) -> list[str]:
    """The steps in a checkpoint of this run that do not stand; ConfigError for one of another."""
    folder, state = checkpoint.folder, checkpoint.state
    if state.run_name != run_name:
        raise ConfigError(
            f"{folder} is a checkpoint of run {state.run_name!r}, and this run is {run_name!r}",
            cure=f"give its model as --model_name_or_path {checkpoint.model}, or another --output_dir",
        )
    status = {step.id: step.status for step in steps}
    unknown = [key for key in state.train_steps if key not in status]
    if unknown:
        raise ConfigError(
            f"{folder} contains {len(unknown)} steps that database {run_name} does not know:"
            " the database has been emptied, or is another one",
            cure="give --resume_from_checkpoint none, or another --output_dir, to start anew",
        )
    return [key for key in state.train_steps if status[key] is not StepStatus.COMMITTED]


def _checked(checkpoint: Checkpoint, base: Path) -> Checkpoint:
    folder, state = checkpoint.folder, checkpoint.state
    expected = architecture(base)
    differing = [key for key in expected if state.architecture.get(key, expected[key]) != expected[key]]
    if differing:
        told = ", ".join(f"{key} {state.architecture[key]} against {expected[key]}" for key in differing)
        raise ModelError(
            f"{folder} holds another architecture than {base}: {told}",
            cure="give the --model_name_or_path that the run started with, or --resume_from_checkpoint none",
        )
    return checkpoint


def _random_states() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
