"""Which process holds which part of the model and of the data, and ``parallelize``, which spreads a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.config.schema import TrainConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
"""The mesh's dimensions, the slowest first: tensor-parallel ranks are neighbours."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many processes share the work along each dimension."""

    dp_replicate: int = 1
    """Copies of the model, each training other data."""
    dp_shard: int = 1
    """Processes that hold one copy between them and train different data (FSDP2)."""
    tp: int = 1
    """Processes that compute one layer between them, on the same data."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """One number for each of ``DIMENSIONS``."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def world(self) -> int:
        """All processes."""
        return math.prod(self.sizes)

    @property
    def data(self) -> int:
        """Processes, or groups of them, that train different data."""
        return self.dp_replicate * self.dp_shard


def plan_layout(config: TrainConfig, world: int) -> Layout:
    """The layout of ``world`` processes; ``dp_shard`` is what the other dimensions leave.

    Raises ConfigError, with the equation, where they do not divide ``world``.
    """
    replicate, tensor = config.dp_replicate_size, config.tp_size
    taken = replicate * tensor
    if world % taken:
        raise ConfigError(
            f"the mesh does not divide the {world} processes: dp_replicate {replicate} × dp_shard ×"
            f" tp {tensor} = {world} has no whole dp_shard ({world} / {taken})",
            cure=f"start a multiple of {taken} processes, or lower --dp_replicate_size or --tp_size",
        )
    return Layout(dp_replicate=replicate, dp_shard=world // taken, tp=tensor)


@dataclass(frozen=True)
class Mesh:
    """The processes of a run in their layout."""

    layout: Layout
    devices: DeviceMesh

    @property
    def rank(self) -> int:
        """This process, over all dimensions."""
        return int(self.devices.get_rank())

    @property
    def data_rank(self) -> int:
        """Which share of the data this process trains, in [0, ``layout.data``)."""
        return self.coordinate("dp_replicate") * self.layout.dp_shard + self.coordinate("dp_shard")

    def coordinate(self, name: str) -> int:
        """This process's place along dimension ``name``."""
        return int(self.devices.get_local_rank(name))

    def group(self, name: str) -> ProcessGroup:
        """The processes that differ from this one along dimension ``name`` alone."""
        return self.devices.get_group(name)


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Lay out the processes; every process of an initialised group calls it."""
    from torch.distributed.device_mesh import init_device_mesh

    return Mesh(layout, init_device_mesh(device_type, layout.sizes, mesh_dim_names=DIMENSIONS))


def parallelize(model: Any, mesh: Mesh, config: TrainConfig) -> None:
    """Spread ``model``, whole and equal on every process, over ``mesh``, in place.

    Its parameters become DTensors, of which each process holds its part; ``parallel.data.RankedModel`` runs
    it. Raises ConfigError for a model that the layout cannot split.
    """
    from agentrl.train.parallel.data import shard_layers
    from agentrl.train.parallel.tensor import split_layers

    if mesh.layout.tp > 1:
        split_layers(model, mesh)
    if mesh.layout.data > 1:
        shard_layers(model, mesh)
