"""Lay out the ranks of a run in a mesh: which part of the model and of the data each rank has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.config.schema import AdapterConfig, MemoryConfig, TrainConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

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

    def sum(self, tensor: Tensor, *, stages: bool = False) -> Tensor:
        """Return the sum of ``tensor`` over the ranks that train different data; ``stages`` adds stages."""
        total = tensor.clone()
        for group in self._groups(("pp", *_DATA) if stages else _DATA):
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
