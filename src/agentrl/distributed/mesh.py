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

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""The mesh's dimensions, the slowest first: tensor-parallel ranks are neighbors."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many processes share the work along each dimension."""

    pp: int = 1
    """Stages of layers that the same data pass one after the other."""
    dp_replicate: int = 1
    """Copies of the model, each training other data."""
    dp_shard: int = 1
    """Processes that hold one copy between them and train different data (FSDP2)."""
    cp: int = 1
    """Processes that share the tokens of the same data between them."""
    ep: int = 1
    """Processes that train different data and hold the experts of a mixture between them."""
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
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def sharers(self) -> int:
        """Processes that compute the same data between them."""
        return self.pp * self.cp * self.tp

    @property
    def shard(self) -> int:
        """Processes that hold between them what is no expert (FSDP2): each computes other tokens."""
        return self.dp_shard * self.cp * self.ep


def plan_layout(config: TrainConfig, world: int) -> Layout:
    """The layout of ``world`` processes; ``dp_shard`` is what the other dimensions leave.

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


@dataclass(frozen=True)
class Mesh:
    """The processes of a run in their layout: one mesh, and two in which neighboring dimensions are one."""

    layout: Layout
    devices: DeviceMesh
    """Of all ``DIMENSIONS``."""
    dense: DeviceMesh
    """``pp``, ``dp_replicate``, ``shard`` (``Layout.shard``), ``tp``: of parameters that are no experts."""
    sparse: DeviceMesh
    """``pp``, ``dp_replicate``, ``shard`` (without ``ep``), ``ep``, ``tp``: of experts."""

    @property
    def rank(self) -> int:
        """This process, over all dimensions."""
        return int(self.devices.get_rank())

    @property
    def data_rank(self) -> int:
        """Which share of the data this process trains, in [0, ``layout.data``)."""
        rank = 0
        for name in ("dp_replicate", "dp_shard", "ep"):
            rank = rank * int(getattr(self.layout, name)) + self.coordinate(name)
        return rank

    @property
    def is_last_stage(self) -> bool:
        """True where hidden states become logprobs."""
        return self.coordinate("pp") == self.layout.pp - 1

    def coordinate(self, name: str) -> int:
        """This process's place along dimension ``name``."""
        return int(self.devices.get_local_rank(name))

    def group(self, name: str) -> ProcessGroup:
        """The processes that differ from this one along dimension ``name`` alone."""
        return self.devices.get_group(name)


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Lay out the processes; every process of an initialized group calls it."""
    from torch.distributed.device_mesh import init_device_mesh

    world = init_device_mesh(device_type, (layout.world,), mesh_dim_names=("world",))
    pipeline, replicas = layout.pp, layout.dp_replicate
    return Mesh(
        layout,
        devices=world._unflatten(0, layout.sizes, DIMENSIONS),
        dense=world._unflatten(
            0, (pipeline, replicas, layout.shard, layout.tp), ("pp", "dp_replicate", "shard", "tp")
        ),
        sparse=world._unflatten(
            0,
            (pipeline, replicas, layout.dp_shard * layout.cp, layout.ep, layout.tp),
            ("pp", "dp_replicate", "shard", "ep", "tp"),
        ),
    )


def parallelize(model: Any, mesh: Mesh, config: TrainConfig) -> None:
    """Spread ``model``, whole and equal on every process, over ``mesh``, in place.

    Its parameters become DTensors, of which each process holds its part; ``fsdp.RankedModel`` runs
    it. With stages of layers, those of the others leave it. Raises ConfigError for a model that the layout
    cannot split, ModelError for one that is not its layers one after the other.
    """
    from agentrl.distributed.context_parallel.model import check_context
    from agentrl.distributed.expert_parallel import check_experts, shard_experts
    from agentrl.distributed.fsdp import shard_layers
    from agentrl.distributed.pipeline_parallel.stages import assign_model_layers, check_stages, keep_stage
    from agentrl.distributed.tensor_parallel import split_layers

    layout = mesh.layout
    shares = assign_model_layers(model, layout.pp) if layout.pp > 1 else []
    if layout.cp > 1:
        check_context(model, config.max_tokens)
    check_experts(model, layout)
    if shares:
        check_stages(model, shares)
    if layout.tp > 1:
        split_layers(model, mesh)
    if shares:
        keep_stage(model, mesh.coordinate("pp"), shares)
    if layout.ep * layout.tp > 1:
        shard_experts(model, mesh)
    if layout.shard * layout.dp_replicate > 1:
        shard_layers(model, mesh)
