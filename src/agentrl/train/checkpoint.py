"""Resumable checkpoints: model, optimizer, schedule, random states and the steps they contain, atomically."""

from __future__ import annotations

import json
import logging
import pickle
import random
import re
import shutil
import struct
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from agentrl.documents.status import StepStatus
from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError, ModelError
from agentrl.model.load import Policy, architecture
from agentrl.train.optimizer_state import load_optimizer
from agentrl.weights.model_folder import (
    SavableModel,
    atomic_model_folder,
    link_equal_files,
    save_model_files,
    weight_bytes,
)

logger = logging.getLogger(__name__)

STATE = "state.json"
_TRAINER = "trainer.pt"
_OPTIMIZER = "optimizer"
_PREFIX = "checkpoint-"
_NAME = re.compile(rf"{_PREFIX}(\d+)(?:-(\d+))?")
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
    attempt: int = 1
    """The trainer that wrote it: the lease's."""


class Fence(Protocol):
    """What a trainer asks before it changes checkpoints; both raise LeaseLostError once it is replaced."""

    def check(self) -> None:
        """Renew the trainer's lease."""

    def discard(self, names: Sequence[str]) -> None:
        """Record that these checkpoints are about to be deleted."""


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
    fence: Fence | None = None,
    same_as: Path | None = None,
) -> Path:
    """Write ``root/checkpoint-000010`` whole, then delete those before the newest ``limit``.

    Of a trainer after the first it is ``checkpoint-000010-ATTEMPT``: two trainers never write one folder.
    Those with steps that are undone are neither counted nor deleted. Files of the model that equal those in
    the folder ``same_as`` share their space on disk. Raises PublishError, with nothing left
    behind, when the disk is full; LeaseLostError when another trainer has taken over.
    """
    policy, kept = trained.policy, trained.kept()
    target = root / _folder_name(state)
    with atomic_model_folder(target, weight_bytes(kept) * _ADAM_COPIES) as temporary:
        (temporary / "model").mkdir()
        save_model_files(kept, policy.base, temporary / "model", policy.chat_template)
        if same_as is not None:
            link_equal_files(temporary / "model", same_as)
        trained.save_optimizer(temporary / _OPTIMIZER)
        torch.save(
            {
                "scheduler": trained.scheduler.state_dict(),
                "random": _random_states(),
            },
            temporary / _TRAINER,
        )
        (temporary / STATE).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
        if fence is not None:
            fence.check()
    surplus = [item.folder for item in _lineage(root, state.train_steps, state.attempt)[:-limit]]
    if surplus and fence is not None:
        fence.discard([folder.name for folder in surplus])
    for folder in surplus:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def find(
    root: Path,
    choice: str | None,
    steps: Sequence[TrainStep],
    *,
    run_name: str,
    base: Path,
    discarded: Collection[str] = (),
) -> Checkpoint | None:
    """The checkpoint to resume from: for ``auto`` the newest complete one whose steps all stand, none for
    ``none``, or a folder.

    ``steps`` are all TrainSteps of the run. ``discarded`` names checkpoints that are being deleted.
    Raises ConfigError for a folder that is none, for one of another run, for one that contains steps which
    the database does not know, and for a named one that contains steps which have been undone; ModelError
    for another architecture than the model in ``base``.
    """
    if choice in (None, "none"):
        return None
    if choice == "auto":
        found = (_read(folder) for folder in reversed(_folders(root)) if folder.name not in discarded)
        standing = (item for item in found if not _undone(item, run_name, steps))
        newest = next(standing, None)
        return newest and _checked(newest, base)
    folder = Path(str(choice))
    if not (folder / STATE).is_file():
        raise ConfigError(
            f"--resume_from_checkpoint {folder} is no checkpoint: it has no {STATE}",
            hint="give 'auto', 'none' or a folder checkpoint-…",
        )
    named = _read(folder)
    undone = _undone(named, run_name, steps)
    if undone:
        raise ConfigError(
            f"{folder} contains {len(undone)} steps that have been undone, {undone[0]} among them: the run"
            " went on from a checkpoint before them, and their data belong to others now",
            hint=f"start another run from its weights: --model_name_or_path {named.model}",
        )
    return _checked(named, base)


def set_aside(root: Path, train_steps: Collection[str], attempt: int) -> list[Path]:
    """Rename checkpoints that contain other steps than ``train_steps`` to ``undone-checkpoint-…``.

    Those steps are undone. Checkpoints of trainers after ``attempt`` stay. Returns the new places.
    """
    moved = []
    standing = {item.folder for item in _lineage(root, train_steps, attempt)}
    for folder in _folders(root):
        if folder not in standing and _step_and_attempt(folder)[1] <= attempt:
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
            hint="resume from another checkpoint, or start with 'none'",
        ) from error


def _folders(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first: a temporary folder has another name until it is whole."""
    if not root.is_dir():
        return []
    found = (path for path in root.iterdir() if _NAME.fullmatch(path.name))
    return sorted((path for path in found if (path / STATE).is_file()), key=_step_and_attempt)


def _folder_name(state: CheckpointState) -> str:
    return f"{_PREFIX}{state.step:06d}" + (f"-{state.attempt}" if state.attempt > 1 else "")


def _step_and_attempt(folder: Path) -> tuple[int, int]:
    found = _NAME.fullmatch(folder.name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


def _lineage(root: Path, train_steps: Collection[str], attempt: int) -> list[Checkpoint]:
    """Checkpoints of trainers up to ``attempt`` that contain no other steps, oldest first."""
    contained = set(train_steps)
    found = []
    for folder in _folders(root):
        try:
            item = _read(folder)
        except ConfigError as error:
            logger.warning("%s", error.message)
            continue
        if item.state.attempt <= attempt and contained.issuperset(item.state.train_steps):
            found.append(item)
    return found


def _read(folder: Path) -> Checkpoint:
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        content.setdefault("attempt", 1)
        values = {item.name: content[item.name] for item in fields(CheckpointState)}
        state = CheckpointState(**{**values, "train_steps": tuple(content["train_steps"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / STATE} cannot be read: {error}", hint="use another checkpoint"
        ) from error
    return Checkpoint(folder, state)


def _undone(checkpoint: Checkpoint, run_name: str, steps: Sequence[TrainStep]) -> list[str]:
    """The steps in a checkpoint of this run that do not stand; ConfigError for one of another."""
    folder, state = checkpoint.folder, checkpoint.state
    if state.run_name != run_name:
        raise ConfigError(
            f"{folder} is a checkpoint of run {state.run_name!r}, and this run is {run_name!r}",
            hint=f"give its model as --model_name_or_path {checkpoint.model}, or another --output_dir",
        )
    status = {step.id: step.status for step in steps}
    unknown = [key for key in state.train_steps if key not in status]
    if unknown:
        raise ConfigError(
            f"{folder} contains {len(unknown)} steps that database {run_name} does not know:"
            " the database has been emptied, or is another one",
            hint="give --resume_from_checkpoint none, or another --output_dir, to start anew",
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
            hint="give the --model_name_or_path that the run started with, or --resume_from_checkpoint none",
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
