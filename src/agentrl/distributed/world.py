"""The processes of one trainer: rank 0 broadcasts commands, and every rank executes them."""

from __future__ import annotations

import contextlib
import datetime
import gc
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from agentrl.errors import TrainingError

logger = logging.getLogger(__name__)

_COMMAND_TIMEOUT = datetime.timedelta(days=30)
"""Rank 0 waits for data between two commands. That it died is noticed at once, by its closed connection."""


@dataclass(frozen=True)
class Command:
    """What every rank executes next."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class World:
    """The processes that torchrun or ``accelerate launch`` started; a single process is a world of one."""

    device: torch.device
    rank: int = 0
    size: int = 1
    commands: dist.ProcessGroup | None = None
    """All ranks, over gloo, with a timeout as long as a command may take to come; None in a world of one."""

    def broadcast(self, command: Command) -> None:
        """Send ``command`` from rank 0 to every other rank."""
        if self.commands is not None:
            dist.broadcast_object_list([command], src=0, group=self.commands)

    def receive(self) -> Command:
        """Wait for rank 0's next command. Raises TrainingError when rank 0 has gone."""
        received: list[Any] = [None]
        try:
            dist.broadcast_object_list(received, src=0, group=self.commands)
        except RuntimeError as error:
            raise TrainingError(
                f"rank {self.rank} lost the connection to rank 0: {str(error).splitlines()[0]}",
                hint="see the log of rank 0, and start the trainer again: it resumes",
            ) from error
        command: Command = received[0]
        return command

    def use_device(self) -> None:
        """Make this rank's device the current one of the calling thread."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)


def single_process() -> World:
    """Return a world of one on the machine's accelerator, or on its CPU."""
    return World(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))


@contextlib.contextmanager
def launched_world() -> Iterator[World]:
    """Join the processes that a launcher started for the length of the block."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield single_process()
        return
    world = _join()
    try:
        yield world
    finally:
        leave_processes()


def _join() -> World:
    """Connect to the other ranks as the launcher's environment says: NCCL on GPUs, gloo on CPUs."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    commands = dist.new_group(backend="gloo", timeout=_COMMAND_TIMEOUT)
    logger.info("rank %d of %d on %s", dist.get_rank(), dist.get_world_size(), device)
    return World(device, dist.get_rank(), dist.get_world_size(), commands)


def leave_processes() -> None:
    """Destroy all process groups.

    First collects models that are no longer used: a group that they still hold would end with the
    interpreter, which aborts when one of the group's threads has just finished its work.
    """
    gc.collect()
    dist.destroy_process_group()
