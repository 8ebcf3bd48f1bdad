"""List the layouts of a number of GPUs, and why the trainer refuses some of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from agentrl.config.load import Configs
from agentrl.config.schema import AdapterConfig, MemoryConfig, TrainConfig
from agentrl.distributed.context_parallel.model import check_context
from agentrl.distributed.expert_parallel import check_experts
from agentrl.distributed.mesh import DIMENSIONS, Layout
from agentrl.distributed.pipeline_parallel.stages import assign_model_layers, check_stages
from agentrl.distributed.tensor_parallel import layer_styles
from agentrl.errors import AgentRLError
from agentrl.plan.gpus import Cluster

_CHOSEN = tuple(name for name in DIMENSIONS if name != "dp_shard")


def name_of(layout: Layout) -> str:
    """Return the layout as text, such as ``fsdp4 × tp2``."""
    names = {"dp_shard": "fsdp", "dp_replicate": "replicate"}
    parts = [
        f"{names.get(name, name)}{size}"
        for name, size in zip(DIMENSIONS, layout.sizes, strict=True)
        if size > 1
    ]
    return " × ".join(parts) or "one GPU"


def list_layouts(cluster: Cluster, configs: Configs) -> Iterator[Layout]:
    """Yield the layouts of all GPUs; a size that was given as a flag is kept.

    Copies of the model (``dp_replicate``) are listed for several machines, one copy each.
    """
    train, world = configs[TrainConfig], cluster.count
    nodes = -(-world // cluster.per_node)
    choices: dict[str, list[int]] = {}
    for name in _CHOSEN:
        given = int(getattr(train, f"{name}_size"))
        if f"{name}_size" in configs.given or given > 1:
            choices[name] = [given]
        elif name == "dp_replicate":
            choices[name] = sorted({1, nodes})
        else:
            choices[name] = [size for size in range(1, world + 1) if world % size == 0]
    for sizes in itertools.product(*choices.values()):
        taken = math.prod(sizes)
        if world % taken == 0:
            yield Layout(**dict(zip(choices, sizes, strict=True)), dp_shard=world // taken)


def refusal(module: Any, layout: Layout, cluster: Cluster, configs: Configs, max_tokens: int) -> str:
    """Return why the trainer refuses ``layout`` of a causal LM, and what would help; empty if it does not."""
    if reason := _flag_refusal(layout, configs):
        return reason
    checks: list[Callable[[], object]] = []
    if layout.tp > 1:
        checks.append(lambda: layer_styles(module, layout.tp))
    if layout.ep * layout.tp > 1:
        checks.append(lambda: check_experts(module, layout))
    if layout.pp > 1:
        checks.append(lambda: check_stages(module, assign_model_layers(module, layout.pp)))
    if layout.cp > 1:
        checks.append(lambda: check_context(module, max_tokens))
    for check in checks:
        try:
            check()
        except AgentRLError as error:
            return f"{error.message}; {error.hint}"
    if max(layout.tp, layout.ep) > cluster.per_node:
        return f"tensor and expert parallelism beyond one machine of {cluster.per_node} GPUs are not planned"
    return ""


def _flag_refusal(layout: Layout, configs: Configs) -> str:
    split = [name for name in ("tp", "pp", "ep") if getattr(layout, name) > 1]
    for flag, value in (
        ("lora_rank", configs[AdapterConfig].lora_rank),
        ("torch_compile", configs[MemoryConfig].torch_compile),
    ):
        if value and split:
            sizes = ", ".join(f"--{name}_size {getattr(layout, name)}" for name in split)
            return f"--{flag} {value} works with sharded layers, not with {sizes}; leave one of them out"
    if configs[MemoryConfig].activation_offload and layout.world > 1:
        return "--activation_offload needs a single process; leave it out"
    return ""
