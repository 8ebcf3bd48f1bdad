"""The processes of one trainer, and the commands that rank 0 broadcasts to all.

accelerate's ``PartialState`` joins the processes and chooses device and backend. Commands go through a group
of their own: its timeout is as long as a wait for data, and that of a step's collectives is not.

``Accelerator.prepare`` is not used. It has no pipeline or expert parallelism, splits a sequence and not a
tree over context-parallel ranks, averages losses where a step has one denominator, and its tensor parallelism
imports a class that transformers 5.23 no longer has.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from agentrl.errors import ConfigError, TrainingError, first_line
from agentrl.weights.folder import stored_bytes

logger = logging.getLogger(__name__)


_COMMAND_TIMEOUT = datetime.timedelta(days=30)
"""Rank 0 waits for data between two commands. That it died is noticed at once, by its closed connection."""
_CUDA_BACKEND = "cpu:gloo,cuda:nccl"
"""Tensors of the device go over NCCL; objects, and weights that are on the host, over gloo."""
_LEAST_TIMEOUT = 3600.0
"""Seconds that ranks wait for each other, at least: to compile FlexAttention, or between two micro-batches.

torch's own limits, 10 and 30 minutes, would end a run on slow storage. A process that died needs no limit:
its launcher ends the others at once.
"""
_STORAGE_RATE = 100e6
"""Bytes per second of the ranks' storage, at least: a disk over a network of 1 Gbit/s."""
_CHECKPOINT_SHARE = 6
"""A checkpoint has at most this many times the bytes of a bfloat16 model: float32 weights and two moments."""


@dataclass(frozen=True)
class World:
    """The processes that torchrun or ``accelerate launch`` started; a single process is a world of one."""

    device: torch.device
    rank: int = 0
    size: int = 1
    commands: dist.ProcessGroup | None = None
    """All ranks, over gloo, with a timeout as long as a command may take to come; None in a world of one."""
    writers: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
    """All ranks, over gloo: for the threads that write versions, and for those that write checkpoints."""

    def broadcast(self, command: str, *arguments: Any) -> None:
        """Send ``command`` and its arguments from rank 0 to every other rank."""
        if self.commands is not None:
            dist.broadcast_object_list([(command, arguments)], src=0, group=self.commands)

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for rank 0's next command and its arguments. Raises TrainingError when rank 0 has gone."""
        received: list[Any] = [None]
        try:
            dist.broadcast_object_list(received, src=0, group=self.commands)
        except RuntimeError as error:
            raise TrainingError(
                f"rank {self.rank} lost the connection to rank 0: {first_line(error)}",
                hint="see the log of rank 0, and start the trainer again: it resumes",
            ) from error
        name, arguments = received[0]
        return name, arguments

    def use_device(self) -> None:
        """Make this rank's device the current one of the calling thread."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)


def single_process() -> World:
    """Return a world of one on the machine's accelerator, or on its CPU."""
    return World(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))


@contextlib.contextmanager
def launched_world(model: Path | None = None) -> Iterator[World]:
    """Join the processes that a launcher started for the length of the block.

    ``model`` is the folder of the weights that they train: how long they wait for each other depends on it.
    """
    world = _join(_timeout(model))
    try:
        yield world
    finally:
        if dist.is_initialized():
            leave_processes()


def join_alone(device: torch.device) -> None:
    """Make a process group of this process alone, unless there is a group: a mesh of one rank needs it.

    ``PartialState`` makes a group only for a launched process, over a port.
    """
    if not dist.is_initialized():
        backend = _CUDA_BACKEND if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def is_first_rank() -> bool:
    """Return whether this is rank 0 by the launcher's variables, or the only process: without a group."""
    return os.environ.get("RANK", "0") == "0"


def _timeout(model: Path | None) -> datetime.timedelta:
    """Return how long a collective may take: as long as the slowest rank needs to write a checkpoint."""
    seconds = 0.0 if model is None else _CHECKPOINT_SHARE * stored_bytes(model) / _STORAGE_RATE
    return datetime.timedelta(seconds=max(_LEAST_TIMEOUT, seconds))


def _join(timeout: datetime.timedelta) -> World:
    """Join the processes of torchrun, ``accelerate launch`` or mpirun; without a launcher, a world of one."""
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ.setdefault("LOCAL_RANK", "0")  # without it, PartialState would start worlds of one
    arguments: dict[str, Any] = {"timeout": timeout}
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available() and not on_cpu:
        index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        arguments |= {"backend": _CUDA_BACKEND, "device_id": torch.device("cuda", index)}
    try:
        state = PartialState(cpu=on_cpu, **arguments)
    except NotImplementedError as error:
        raise ConfigError(
            f"these GPUs have no peer-to-peer transfers: {error}",
            hint="export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1, or start with accelerate launch, which does",
        ) from error
    # PartialState numbers CPUs as it does GPUs; torch has one.
    device = torch.device("cpu") if state.device.type == "cpu" else state.device
    if state.num_processes == 1:
        return World(device)
    commands = dist.new_group(backend="gloo", timeout=_COMMAND_TIMEOUT)
    versions, checkpoints = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    logger.info("rank %d of %d on %s", state.process_index, state.num_processes, device)
    return World(device, state.process_index, state.num_processes, commands, (versions, checkpoints))


def leave_processes() -> None:
    """Destroy all process groups.

    First collects models that are no longer used: a group that they still hold would end with the
    interpreter, which aborts when one of the group's threads has just finished its work.
    """
    gc.collect()
    dist.destroy_process_group()
