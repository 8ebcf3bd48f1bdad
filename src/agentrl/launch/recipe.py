"""Read a recipe, the flags of a way to train or evaluate, and the flags that environment variables set.

A recipe is a YAML file of flags, such as ``assets/configs/grpo.yml``. What is given otherwise wins over it.
Its section ``demo`` holds for a run without a model and tasks of its own, its section ``own`` for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.arguments import flag_words
from agentrl.config.load import Configs, flags_of
from agentrl.config.schema import GROUPS, ModelConfig, PlacementConfig, TaskConfig
from agentrl.errors import ConfigError, nearest
from agentrl.settings_file import read_settings
from agentrl.shipped_files import shipped_files

TASK_FILES = {"train": "train_file", "eval": "eval_file"}
"""Command that ``agentrl launch`` runs → the flag of its task file."""
_VARIABLES = {
    "model_name_or_path": "MODEL_PATH",
    "tp_size": "TP_SIZE",
    "mcp_manager_url": "MCP_MANAGER_URL",
    "agent_config_path": "AGENT_CONFIG",
    "engine": "ENGINE",
}
_ACCELERATE_SIZES = ("dp_replicate_size", "tp_size", "cp_size")


def flags_of_variables(variables: Mapping[str, str], tasks: str) -> list[str]:
    """Return the flags that the environment variables set; later flags of the command line override them.

    ``tasks`` is the flag of the run's task file, ``train_file`` or ``eval_file``.

    MONGO_URI and MONGO_URI_FILE are left to the processes, so that no password is in a command line.
    """
    named = {**_VARIABLES, tasks: tasks.upper()}
    if not variables.get("MCP_MANAGER_URL"):
        named["mcp_servers_file"] = "MCP_SERVERS_FILE"
    return flag_words({flag: variables[name] for flag, name in named.items() if variables.get(name)})


def read_recipe(configs: Configs, tasks: str) -> dict[str, Any]:
    """Return the flags of ``--recipe`` that were not given; ``tasks`` is the flag of the run's task file.

    Raises ConfigError for an unknown recipe, and for a model without tasks or tasks without a model.
    """
    name = configs[PlacementConfig].recipe
    if name is None:
        return {}
    folder = shipped_files() / "configs"
    path = Path(name) if Path(name).suffix else folder / f"{name}.yml"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.yml"))
        raise ConfigError(
            f"--recipe is {name}; choose one of {', '.join(known)}, or a YAML file of flags",
            hint=nearest(name, known),
        )
    model, file = configs[ModelConfig].model_name_or_path, getattr(configs[TaskConfig], tasks)
    for flag, variable, value, other in (
        ("model_name_or_path", "MODEL_PATH", model, file), (tasks, tasks.upper(), file, model),
    ):  # fmt: skip
        if value is None and other is not None:
            raise ConfigError(
                f"{other} is given, and no --{flag}", hint=f"export {variable}=…, or give the flag"
            )
    read = read_settings(path, hint="write one 'flag: value' per line")
    content = dict(read.content)
    demo, own = content.pop("demo", {}), content.pop("own", {})
    chosen = own
    if model is None and demo:
        chosen = {**demo, tasks: str(shipped_files() / demo[tasks])}
    found = flags_of(read, {**content, **chosen}, GROUPS)
    return {flag: value for flag, value in found.items() if flag not in configs.given}


@dataclass(frozen=True)
class AccelerateConfig:
    """What ``ACCELERATE_CONFIG`` says about machines and devices."""

    path: str | None = None
    """None: the variable names no file."""
    machines: int = 1
    uses_cpu: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Flags that its ``parallelism_config`` sets, such as ``tp_size``."""


def read_accelerate_config(path: str | None) -> AccelerateConfig:
    """Read the file that ``ACCELERATE_CONFIG`` names. Raises ConfigError if it chooses GPUs itself."""
    if not path:
        return AccelerateConfig()
    file = read_settings(path, what="ACCELERATE_CONFIG", hint="accelerate config writes one")
    content = file.content
    if not isinstance(content, dict):
        raise file.error("the file holds no mapping")
    chosen = str(content.get("gpu_ids") or "all")
    if chosen != "all":
        raise file.error(
            f"gpu_ids is {chosen}, which would replace the GPUs of the placement", "gpu_ids",
            hint=f"remove gpu_ids, and give --train_gpus {chosen}",
        )  # fmt: skip
    uses_cpu = bool(content.get("use_cpu")) or content.get("distributed_type") == "MULTI_CPU"
    parallelism = content.get("parallelism_config") or {}
    found = {name: parallelism.get(f"parallelism_config_{name}") for name in _ACCELERATE_SIZES}
    sizes = {name: int(size) for name, size in found.items() if size}
    return AccelerateConfig(path, int(content.get("num_machines") or 1), uses_cpu, sizes)
