"""Resumable checkpoints: model, optimizer, schedule, random states and the steps they contain, atomically."""

from __future__ import annotations

import json
import logging
import pickle
import random
import re
import shutil
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from agentrl.errors import ConfigError, ModelError
from agentrl.train.model import Policy, architecture
from agentrl.weights.folder import atomic_folder, save_model_files, weight_bytes

logger = logging.getLogger(__name__)

STATE = "state.json"
_TRAINER = "trainer.pt"
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
    """The newest version published when it was written."""
    is_published: bool
    """The weights are those of ``policy_version``."""
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
        """The optimizer."""

    @property
    def scheduler(self) -> LRScheduler:
        """The learning-rate schedule."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; ``folder/model`` is a Hugging Face folder."""

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
    policy = trained.policy
    target = root / f"checkpoint-{state.step:06d}"
    with atomic_folder(target, weight_bytes(policy.model) * _ADAM_COPIES) as temporary:
        (temporary / "model").mkdir()
        save_model_files(policy.model, policy.base, temporary / "model", policy.chat_template)
        torch.save(
            {
                "optimizer": trained.optimizer.state_dict(),
                "scheduler": trained.scheduler.state_dict(),
                "random": _random_states(),
            },
            temporary / _TRAINER,
        )
        (temporary / STATE).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    for old in _folders(root)[:-limit]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def find(root: Path, choice: str | None, *, run_name: str, base: Path) -> Checkpoint | None:
    """The checkpoint to resume from: the newest complete one for ``auto``, none for ``none``, or a folder.

    Raises ConfigError for a folder that is none, and for one of another run; ModelError for another
    architecture than the model in ``base``.
    """
    if choice in (None, "none"):
        return None
    if choice == "auto":
        found = _folders(root)
        return _checked(found[-1], run_name, base) if found else None
    folder = Path(str(choice))
    if not (folder / STATE).is_file():
        raise ConfigError(
            f"--resume_from_checkpoint {folder} is no checkpoint: it has no {STATE}",
            cure="give 'auto', 'none' or a folder checkpoint-…",
        )
    return _checked(folder, run_name, base)


def restore(checkpoint: Checkpoint, trained: Resumable) -> None:
    """Load optimizer, schedule and random states; the model is loaded from ``checkpoint.model``."""
    path = checkpoint.folder / _TRAINER
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        trained.optimizer.load_state_dict(content["optimizer"])
        trained.scheduler.load_state_dict(content["scheduler"])
        _restore_random_states(content["random"])
    except _UNREADABLE as error:
        raise ModelError(
            f"{path} cannot be restored: {error}", cure="resume from another checkpoint, or start with 'none'"
        ) from error


def _folders(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first: a temporary folder has another name until it is whole."""
    if not root.is_dir():
        return []
    found = (path for path in root.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name))
    return sorted((path for path in found if (path / STATE).is_file()), key=lambda path: path.name)


def _checked(folder: Path, run_name: str, base: Path) -> Checkpoint:
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        state = CheckpointState(**{**content, "train_steps": tuple(content["train_steps"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / STATE} cannot be read: {error}", cure="use another checkpoint"
        ) from error
    if state.run_name != run_name:
        raise ConfigError(
            f"{folder} is a checkpoint of run {state.run_name!r}, and this run is {run_name!r}",
            cure=f"give its model as --model_name_or_path {folder / 'model'}, or another --output_dir",
        )
    expected = architecture(base)
    differing = [key for key in expected if state.architecture.get(key, expected[key]) != expected[key]]
    if differing:
        told = ", ".join(f"{key} {state.architecture[key]} against {expected[key]}" for key in differing)
        raise ModelError(
            f"{folder} holds another architecture than {base}: {told}",
            cure="give the --model_name_or_path that the run started with, or --resume_from_checkpoint none",
        )
    return Checkpoint(folder, state)


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
