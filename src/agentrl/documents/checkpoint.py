"""The checkpoints in a run's output folder: their names, and the steps that their weights contain."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)

STATE = "state.json"
_NAME = re.compile(r"(undone-)?checkpoint-(\d+)(?:-(\d+))?")


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """The content of ``state.json``."""

    run_name: str
    step: int
    policy_version: int
    """The newest published version at that time; the checkpoint's own weights are published later."""
    train_steps: tuple[str, ...]
    """``_id`` of every TrainStep in the weights, in order."""
    architecture: dict[str, Any]
    attempt: int = 1
    """Attempt of its trainer's lease: a later trainer may have resumed from an earlier step."""

    @property
    def folder_name(self) -> str:
        """From attempt 2 on it ends with the attempt: two trainers never write one folder."""
        return f"checkpoint-{self.step:06d}" + (f"-{self.attempt}" if self.attempt > 1 else "")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    state: CheckpointState

    @property
    def model(self) -> Path:
        """A Hugging Face folder, or peft's adapter folder."""
        return self.folder / "model"


def is_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` is a complete checkpoint, whatever its name."""
    return (folder / STATE).is_file()


def state_files(root: Path, *, undone: bool = False) -> Iterator[Path]:
    """Yield the ``state.json`` of each ``read_checkpoints``."""
    return root.glob(f"{'*' if undone else ''}checkpoint-*/{STATE}")


def checkpoint_folders(root: Path, *, undone: bool = False, attempt: int | None = None) -> list[Path]:
    """Return the complete checkpoints that a trainer named, the newest of the last trainer last.

    ``undone`` includes those with reverted steps, which a resume has renamed. ``attempt`` leaves out those of
    later trainers.
    """
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        name = _NAME.fullmatch(path.name)
        if name is not None and (undone or not name[1]) and is_checkpoint(path):
            found.append((int(name[3] or 1), int(name[2]), path))
    return [path for number, _, path in sorted(found) if attempt is None or number <= attempt]


def read_checkpoints(root: Path, *, undone: bool = False) -> list[Checkpoint]:
    """Read the complete checkpoints, the newest of the last trainer last, also renamed: checkpoint-best.

    ``undone`` includes those with reverted steps, and those that a killed trainer was still writing. Raises
    ConfigError if one is unreadable.
    """
    found = [read_checkpoint(state.parent) for state in state_files(root, undone=undone)]
    return sorted(found, key=lambda item: (item.state.attempt, item.state.step))


def readable_checkpoints(root: Path, attempt: int | None = None) -> list[Checkpoint]:
    """Read the ``checkpoint_folders`` that can be read; log the others."""
    found = []
    for folder in checkpoint_folders(root, attempt=attempt):
        try:
            found.append(read_checkpoint(folder))
        except ConfigError as error:
            logger.warning("%s", error.message)
    return found


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's ``state.json``. Raises ConfigError if it is unreadable."""
    try:
        content = {"attempt": 1, **json.loads((folder / STATE).read_text(encoding="utf-8"))}
        values = {item.name: content[item.name] for item in fields(CheckpointState)}
        state = CheckpointState(**{**values, "train_steps": tuple(content["train_steps"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / STATE} cannot be read: {error}",
            hint="use another checkpoint, or repair or delete this one",
        ) from error
    return Checkpoint(folder, state)
