"""All flags of a run: one dataclass per concern, and one section of a YAML file for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from agentrl.config.flags import JsonFlags, flag
from agentrl.config.run import (
    DeviceConfig,
    EngineConfig,
    EngineListConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    TraceConfig,
)
from agentrl.config.sampling import (
    AgentConfig,
    ClaimConfig,
    ContainerConfig,
    EvaluationConfig,
    GatewayConfig,
    SamplingConfig,
    TaskConfig,
    TeacherConfig,
    ToolConfig,
)
from agentrl.config.training import (
    AdapterConfig,
    GroupConfig,
    IgnoredConfig,
    LossConfig,
    MemoryConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)

__all__ = [
    "GROUPS", "AdapterConfig", "AgentConfig", "ClaimConfig", "ContainerConfig", "DeviceConfig",
    "EngineConfig", "EngineListConfig", "EvaluationConfig", "GatewayConfig", "GroupConfig", "IgnoredConfig",
    "JsonFlags", "LossConfig", "MemoryConfig", "ModelConfig", "OptimConfig", "ParallelConfig",
    "PlacementConfig", "RunConfig", "SamplingConfig", "TaskConfig", "TeacherConfig", "ToolConfig",
    "TraceConfig", "TrainConfig", "flag", "sections",
]  # fmt: skip

GROUPS: tuple[type, ...] = (
    RunConfig, ModelConfig, TaskConfig, ClaimConfig, AgentConfig, ToolConfig, ContainerConfig, SamplingConfig,
    GroupConfig, LossConfig, OptimConfig, AdapterConfig, MemoryConfig, TrainConfig, EngineConfig,
    PlacementConfig, EvaluationConfig, GatewayConfig, TraceConfig, TeacherConfig, IgnoredConfig,
)  # fmt: skip
"""All groups. A run has one set of flags: every process accepts all of them and reads those it needs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """The flags of one dataclass, under the key that they may have in a YAML file."""

    key: str
    title: str
    flags: tuple[dataclasses.Field[Any], ...]
    types: Mapping[str, Any]
    """Flag → its type."""


def sections(*groups: type) -> list[Section]:
    """Return the sections of ``groups``, in order; a dataclass that extends another has two.

    A group without a key of its own has its flags in the section ``command``.
    """
    found = []
    for group in groups:
        fields = {item.name: item for item in dataclasses.fields(group)}
        for kind in (kind for kind in group.__mro__ if dataclasses.is_dataclass(kind)):
            own = vars(kind).get("__annotations__", {})
            flags = tuple(item for name, item in fields.items() if name in own)
            title = (kind.__doc__ or "").splitlines()[0].rstrip(".")
            key = vars(kind).get("section", "command")
            found.append(Section(key, title, flags, get_type_hints(kind)))
    return found
