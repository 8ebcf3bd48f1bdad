"""The processes of one trainer: their mesh, what each holds, and the commands that rank 0 broadcasts.

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
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.config.schema import AdapterConfig, MemoryConfig, TrainConfig
from agentrl.errors import ConfigError, TrainingError, first_line
from agentrl.weights.folder import stored_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

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
    # Make one for each thread: collectives of two threads in one group would meet each other's.
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


DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""The mesh's dimensions, the slowest first: tensor-parallel ranks are neighbors."""
_DATA = ("ep", "dp_shard", "dp_replicate")
"""Dimensions along which ranks train different data."""

Summable = TypeVar("Summable", bound=Any)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks divide the work along each dimension."""

    pp: int = 1
    """Stages of layers that the same data pass one after the other."""
    dp_replicate: int = 1
    """Copies of the model, each training other data."""
    dp_shard: int = 1
    """Ranks that shard one copy of the model and train different data (FSDP2)."""
    cp: int = 1
    """Ranks that split the tokens of the same data."""
    ep: int = 1
    """Ranks that split the experts of a mixture and train different data."""
    tp: int = 1
    """Ranks that split each layer's matrices, on the same data."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each of ``DIMENSIONS``."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def data(self) -> int:
        """The number of ranks, or groups of ranks, that train different data."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def ranks_per_data(self) -> int:
        """The number of ranks that compute the same data together."""
        return self.pp * self.cp * self.tp

    @property
    def shard(self) -> int:
        """The number of ranks that shard what is not an expert (FSDP2); each computes other tokens."""
        return self.dp_shard * self.cp * self.ep

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 shards or replicates the layers."""
        return self.shard * self.dp_replicate > 1


def plan_layout(config: TrainConfig, world: int) -> Layout:
    """Return the layout of ``world`` ranks; ``dp_shard`` is what the other dimensions leave.

    Raises ConfigError, with the equation, where they do not divide ``world``.
    """
    sizes = {name: getattr(config, f"{name}_size") for name in DIMENSIONS if name != "dp_shard"}
    taken = math.prod(sizes.values())
    if world % taken:
        product = " × ".join(f"{name} {sizes[name]}" if name in sizes else name for name in DIMENSIONS)
        larger = [f"--{name}_size" for name, size in sizes.items() if size > 1]
        raise ConfigError(
            f"the mesh does not divide the {world} processes: {product} = {world} has no whole dp_shard"
            f" ({world} / {taken})",
            hint=f"start a multiple of {taken} processes, or lower {' or '.join(larger)}",
        )
    return Layout(**sizes, dp_shard=world // taken)


def check_flags(layout: Layout, adapter: AdapterConfig, memory: MemoryConfig) -> None:
    """Raise ConfigError for flags that need whole layers, which FSDP2 alone leaves."""
    sizes = [
        f"--{name}_size {getattr(layout, name)}" for name in ("tp", "pp", "ep") if getattr(layout, name) > 1
    ]
    for flag, value in (("lora_rank", adapter.lora_rank), ("torch_compile", memory.torch_compile)):
        if value and sizes:
            raise ConfigError(
                f"--{flag} {value} with {' '.join(sizes)}: it works with layers that FSDP2 shards, not with"
                " layers that are split",
                hint="set these sizes to 1: FSDP2 shards the layers over those processes too; or leave out"
                f" --{flag}",
            )


@dataclass(frozen=True)
class DeviceMeshes:
    """One mesh over all ranks, seen with different dimensions."""

    devices: DeviceMesh
    """With all ``DIMENSIONS``."""
    dense: DeviceMesh
    """``pp``, ``dp_replicate``, ``shard`` (``Layout.shard``), ``tp``: for parameters outside the experts."""
    sparse: DeviceMesh
    """``pp``, ``dp_replicate``, ``shard`` (without ``ep``), ``ep``, ``tp``: for experts."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run in their layout, and sums over them. The default is a single process."""

    layout: Layout = field(default_factory=Layout)
    meshes: DeviceMeshes | None = None
    """None for a single process."""

    @property
    def dense(self) -> DeviceMesh:
        """``DeviceMeshes.dense``."""
        return self._meshes.dense

    @property
    def shards(self) -> DeviceMesh:
        """The dimensions of ``dense`` that FSDP2 works on: ``shard``, and ``dp_replicate`` if it has ranks.

        FSDP2 would all-reduce every gradient over a ``dp_replicate`` of one rank too.
        """
        return self.dense["dp_replicate", "shard"] if self.layout.dp_replicate > 1 else self.dense["shard"]

    @property
    def sparse(self) -> DeviceMesh:
        """``DeviceMeshes.sparse``."""
        return self._meshes.sparse

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank trains, in [0, ``layout.data``)."""
        rank = 0
        for name in ("dp_replicate", "dp_shard", "ep"):
            rank = rank * int(getattr(self.layout, name)) + self.coordinate(name)
        return rank

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank turns hidden states into logprobs."""
        return self.coordinate("pp") == self.layout.pp - 1

    def coordinate(self, name: str) -> int:
        """Return this rank's coordinate along dimension ``name``."""
        return 0 if self.meshes is None else int(self.meshes.devices.get_local_rank(name))

    def group(self, name: str) -> ProcessGroup:
        """Return the group of ranks that differ from this one only along dimension ``name``."""
        return self._meshes.devices.get_group(name)

    def sum(self, tensor: Tensor, *, stages: bool = False, tokens: bool = False) -> Tensor:
        """Return the sum of ``tensor`` over the ranks that train different data.

        ``stages`` adds those of other layers, ``tokens`` those of other tokens of the same data.
        """
        total = tensor.clone()
        for group in self._groups((*(("pp",) if stages else ()), *(("cp",) if tokens else ()), *_DATA)):
            dist.all_reduce(total, dist.ReduceOp.SUM, group)
        return total

    def sum_reports(self, report: Summable) -> Summable:
        """Return the sum of a picklable ``report`` over all stages and ranks that train different data."""
        for group in self._groups(("pp", *_DATA)):
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, report, group=group)
            report = sum(gathered[1:], gathered[0])
        return report

    def _groups(self, names: tuple[str, ...]) -> list[ProcessGroup]:
        return [self.group(name) for name in names if getattr(self.layout, name) > 1]

    @property
    def _meshes(self) -> DeviceMeshes:
        if self.meshes is None:
            raise ValueError("a single process has no device mesh")
        return self.meshes


def build_mesh(layout: Layout, device_type: str, *, single: bool = False) -> Mesh:
    """Return the mesh of ``layout``. Each rank calls it after joining the process group.

    A single process needs neither, unless ``single`` asks for a mesh of one rank, for FSDP2.
    """
    if layout.world == 1 and not single:
        return Mesh()
    # Derive all from one mesh: FSDP2 joins its own with that of a DTensor, and both need one origin.
    world = init_device_mesh(device_type, (layout.world,), mesh_dim_names=("world",))
    stages, replicas = layout.pp, layout.dp_replicate
    return Mesh(
        layout,
        DeviceMeshes(
            devices=world._unflatten(0, layout.sizes, DIMENSIONS),
            dense=world._unflatten(
                0, (stages, replicas, layout.shard, layout.tp), ("pp", "dp_replicate", "shard", "tp")
            ),
            sparse=world._unflatten(
                0,
                (stages, replicas, layout.dp_shard * layout.cp, layout.ep, layout.tp),
                ("pp", "dp_replicate", "shard", "ep", "tp"),
            ),
        ),
    )
