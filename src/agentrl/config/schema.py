"""All flags of a run: one dataclass per concern, a section of a YAML file for each, and docs/flags.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from agentrl.config.flags import Auto, JsonFlags, choices_of, constraint, flag, kind_name
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
    CriticConfig,
    GroupConfig,
    IgnoredConfig,
    LossConfig,
    MemoryConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)

__all__ = [
    "GROUPS", "AdapterConfig", "AgentConfig", "ClaimConfig", "ContainerConfig", "CriticConfig",
    "DeviceConfig", "EngineConfig", "EngineListConfig", "EvaluationConfig", "GatewayConfig", "GroupConfig",
    "IgnoredConfig", "JsonFlags", "LossConfig", "MemoryConfig", "ModelConfig", "OptimConfig",
    "ParallelConfig", "PlacementConfig", "RunConfig", "SamplingConfig", "TaskConfig", "TeacherConfig",
    "ToolConfig", "TraceConfig", "TrainConfig", "flag", "sections",
]  # fmt: skip

GROUPS: tuple[type, ...] = (
    RunConfig, ModelConfig, TaskConfig, ClaimConfig, AgentConfig, ToolConfig, ContainerConfig, SamplingConfig,
    GroupConfig, LossConfig, CriticConfig, OptimConfig, AdapterConfig, MemoryConfig, TrainConfig,
    EngineConfig, PlacementConfig, EvaluationConfig, GatewayConfig, TraceConfig, TeacherConfig, IgnoredConfig,
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


_HEAD = """# Flags

[中文](zh/flags.md)

Every process of a run accepts every flag below and reads those it needs, so one set of flags, or one YAML
file with the same names (`--config run.yml`; flags win), serves a whole run. In the file, flags may be
grouped in sections with the keys below, or stand flat:

```yaml
run_name: math
loss:
  loss_calculater: GSPO
parallel:
  tp_size: 2
```

- **Names.** Every process of a run needs `--run_name`. `--run-name` is the same; there are no abbreviations.
  Of a flag that is given twice, the last one counts. `agentrl COMMAND --help` lists those that it reads.
- **Values.** `--balance_sample` turns a bool on, `--no_shuffle_tasks` or `--shuffle_tasks false` one off.
  YAML reads `1e-6` as text: write `1.0e-6`.
- **Variables.** A URI with a password belongs neither on a command line nor into the file: `MONGO_URI` has
  it, or a file that `MONGO_URI_FILE` names. `agentrl launch` and its scripts take `MODEL_PATH`, `TRAIN_FILE`,
  `EVAL_FILE`, `ENGINE`, `TP_SIZE`, `MCP_SERVERS_FILE`, `MCP_MANAGER_URL` and `AGENT_CONFIG` as
  `--model_name_or_path`, `--train_file`, `--eval_file`, `--engine`, `--tp_size`, `--mcp_servers_file`,
  `--mcp_manager_url` and `--agent_config_path`; they win over the file, and flags over them.

An unknown flag, section or key is an error that names the nearest known one. A value outside the range of its
flag is refused at start. `python -m agentrl.config.schema > docs/flags.md` writes this page.
"""


def flags_page() -> str:
    """Return docs/flags.md: a table per section."""
    return "\n".join([_HEAD, *(_table(section) for section in sections(*GROUPS))])


def _table(section: Section) -> str:
    lines = [
        f"## {section.title}",
        "",
        f"Section `{section.key}:`.",
        "",
        "| flag | value | default | meaning |",
        "|---|---|---|---|",
    ]
    for item in section.flags:
        default = "" if item.default in (None, "") else f"`{item.default}`"
        meaning = str(item.metadata["help"]).replace("|", "\\|")
        lines.append(
            f"| `--{item.name}` | {_value(item, section.types[item.name])} | {default} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def _value(item: dataclasses.Field[Any], kind: Any) -> str:
    """Return the choices of a flag, or its type with range and unit."""
    if choices_of(kind):
        return ", ".join(f"`{choice}`" for choice in choices_of(kind))
    value = " ".join(filter(None, (kind_name(kind), constraint(item))))
    return f"{value}, or `auto`" if Auto in get_args(kind) else value


if __name__ == "__main__":
    print(flags_page(), end="")
