"""``agentrl train`` that is killed, paused or out of memory at one point.

python -m trainer_faults FAULT FLAGS
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from agentrl.base import atomic_folder
from agentrl.cli.main import main
from agentrl.distributed import parallel_model
from agentrl.store import steps
from agentrl.train import controller
from agentrl.train.step import PolicyTrainer


def kill_in_step(step: int) -> None:
    """Kill it when the step is computed and not committed."""
    train = PolicyTrainer.train

    def train_and_die(self: PolicyTrainer, *data: Any) -> Any:
        result = train(self, *data)
        if self.scheduler.last_epoch == step:
            _die()
        return result

    patch.object(PolicyTrainer, "train", train_and_die).start()


def kill_between_parts() -> None:
    """Kill it when two of the four parts of step 2 are committed."""
    patch.object(steps, "CHUNK", 1).start()
    count, seen = steps.train_data, []

    async def count_and_die(connection: Any, number: int, pending: Any, ids: Any) -> None:
        if number == 2 and len(seen) == 2:
            _die()
        seen.extend(ids if number == 2 else ())
        await count(connection, number, pending, ids)

    patch.object(steps, "train_data", count_and_die).start()


def kill_while_writing() -> None:
    """Kill it when it has written half of the version of step 2."""
    write = controller.write_share

    def write_half_and_die(folder: Path, snapshot: Any) -> Any:
        if folder.name != "model" and "step-000001" not in folder.name:
            (folder / "model.safetensors").write_bytes(b"half")
            _die()
        return write(folder, snapshot)

    patch.object(controller, "write_share", write_half_and_die).start()


def exhaust_memory() -> None:
    """Let step 2 need a PiB."""
    train = PolicyTrainer.train

    def train_in_little(self: PolicyTrainer, *data: Any) -> Any:
        if self.scheduler.last_epoch == 1:
            patch.object(parallel_model, "forest_logprobs", lambda *_: torch.empty(1 << 50)).start()
        return train(self, *data)

    patch.object(PolicyTrainer, "train", train_in_little).start()


def pause() -> None:
    """Pause it before the folder of version 2 appears."""
    replace = atomic_folder._replace

    def pause_and_replace(temporary: Path, target: Path) -> None:
        if target.name == "v000002":
            os.kill(os.getpid(), signal.SIGSTOP)
        replace(temporary, target)

    patch.object(atomic_folder, "_replace", pause_and_replace).start()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "kill_in_step_2": lambda: kill_in_step(2),
    "kill_in_step_4": lambda: kill_in_step(4),
    "kill_between_parts": kill_between_parts,
    "kill_while_writing": kill_while_writing,
    "exhaust_memory": exhaust_memory,
    "pause": pause,
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(main(["train", *sys.argv[2:]]))
