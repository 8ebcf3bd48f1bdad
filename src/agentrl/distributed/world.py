"""The processes of one trainer: rank 0 decides and tells the others, and then all do the same."""

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

_IDLE = datetime.timedelta(days=30)
"""How long an order may be waited for: rank 0 waits for data in between; that it died is noticed at once."""


@dataclass(frozen=True)
class Order:
    """What all processes do next: the name of a thing and what it needs."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class World:
    """This process among those that torchrun or ``accelerate launch`` started."""

    rank: int
    world: int
    device: torch.device
    orders: dist.ProcessGroup
    """Of all processes, over the CPU; it waits as long as an order takes to come."""

    def tell(self, name: str, *arguments: Any) -> None:
        """On rank 0: have every other process hear this order."""
        dist.broadcast_object_list([Order(name, arguments)], src=0, group=self.orders)

    def hear(self) -> Order:
        """On the others: wait for rank 0's next order. Raises TrainingError when rank 0 has gone."""
        heard: list[Any] = [None]
        try:
            dist.broadcast_object_list(heard, src=0, group=self.orders)
        except RuntimeError as error:
            raise TrainingError(
                f"rank {self.rank} no longer hears rank 0: {str(error).splitlines()[0]}",
                hint="see what rank 0 says, and start the trainer again: it resumes",
            ) from error
        order: Order = heard[0]
        return order

    def use_device(self) -> None:
        """Make this thread compute on the team's device: CUDA's choice is a thread's own."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def leave(self) -> None:
        """Part from the other processes."""
        leave_processes()


@contextlib.contextmanager
def launched_world() -> Iterator[World | None]:
    """Meet the processes that a launcher started, and part from them at the end; None for one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    team = join_world()
    try:
        yield team
    finally:
        team.leave()


def join_world() -> World:
    """Meet the other processes, as the launcher's environment describes them: NCCL on GPUs, gloo on CPUs."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    orders = dist.new_group(backend="gloo", timeout=_IDLE)
    logger.info("rank %d of %d on %s", dist.get_rank(), dist.get_world_size(), device)
    return World(dist.get_rank(), dist.get_world_size(), device, orders)


def leave_processes() -> None:
    """End the process groups.

    Those that discarded models still hold would end with the interpreter, which aborts when one of their
    threads has just finished something then.
    """
    gc.collect()
    dist.destroy_process_group()
