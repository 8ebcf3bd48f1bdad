"""Read which optimizer steps the checkpoints in a run's output folder contain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

_HINT = "repair or delete that checkpoint, or leave --output_dir out"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: its step, and the ids of the TrainSteps in its weights, in order."""

    name: str
    step: int
    train_steps: tuple[str, ...]


def newest_checkpoint(output: Path) -> Checkpoint | None:
    """Return the last trainer's newest checkpoint in ``output``. Raises ConfigError if one is unreadable."""
    found: list[tuple[int, Checkpoint]] = []
    for path, state in _states(output):
        try:
            checkpoint = Checkpoint(path.parent.name, int(state["step"]), tuple(state["train_steps"]))
            found.append((int(state.get("attempt", 1)), checkpoint))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", hint=_HINT) from error
    newest = max(found, key=lambda item: (item[0], item[1].step), default=None)
    return None if newest is None else newest[1]


def oldest_checkpoint_step(output: Path) -> int | None:
    """Return the step of the oldest checkpoint: a resume from it trains all later steps again.

    None without a checkpoint. Raises ConfigError if one is unreadable.
    """
    steps = []
    for path, state in _states(output):
        try:
            steps.append(int(state["step"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", hint=_HINT) from error
    return min(steps, default=None)


def _states(output: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in output.glob("checkpoint-*/state.json"):
        try:
            yield path, json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", hint=_HINT) from error
