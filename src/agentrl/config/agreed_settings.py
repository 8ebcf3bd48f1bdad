"""Collect the settings that the processes of a run must agree on, and a process's resolved configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from agentrl.config.load import Configs
from agentrl.config.schema import (
    GROUPS,
    AdapterConfig,
    AgentConfig,
    GroupConfig,
    LossConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.documents.sampling import SamplingParams

AgreedSettings = dict[str, dict[str, Any]]
"""Concern → setting → value."""

_PACKAGES = ("agentrl", "torch", "transformers", "accelerate", "peft", "tokenizers", "pymongo", "mcp")
_SAMPLED = ("tool_call_parser", "agent_name", "system_prompt", "query_prompt", "new_context")
_ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "intermediate_size",
)  # fmt: skip


def sampler_settings(configs: Configs) -> AgreedSettings:
    """Return the settings of sampling: group size, order, prompts, and how groups become advantages."""
    agent = configs[AgentConfig]
    sampled = SamplingParams.from_json(configs[SamplingConfig].preferred_sampling_params)
    return {
        "tasks": {"num_generations": configs[TaskConfig].num_generations},
        "temperature": {"temperature": sampled.temperature},
        "sampling": {
            **{name: getattr(agent, name) for name in _SAMPLED},
            "seed": configs[RunConfig].seed,
            "shuffle_tasks": configs[TaskConfig].shuffle_tasks,
            "task_selection": configs[TaskConfig].task_selection,
        },
        "groups": dataclasses.asdict(configs[GroupConfig]),
    }


def trainer_settings(configs: Configs, loss: LossConfig) -> AgreedSettings:
    """Return the settings of training: the loss, with its defaults filled in, and the adapters."""
    return {
        "loss": {
            **dataclasses.asdict(loss),
            "advantage_whitening": configs[TrainConfig].advantage_whitening,
        },
        "adapter": dataclasses.asdict(configs[AdapterConfig]),
    }


def model_settings(folder: Path) -> dict[str, Any]:
    """Return the shape of a model and the hash of its tokenizer, as far as the folder has them."""
    settings: dict[str, Any] = {}
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = {name: content[name] for name in _ARCHITECTURE if content.get(name) is not None}
        tokenizer = (folder / "tokenizer.json").read_bytes()
        settings["tokenizer"] = f"sha256 {hashlib.sha256(tokenizer).hexdigest()[:16]}"
    except (OSError, ValueError, AttributeError):
        return settings
    return settings


def public_flags(configs: Configs) -> dict[str, Any]:
    """Return every flag by name, except secret ones."""
    return {
        item.name: getattr(group, item.name)
        for group in configs
        for item in dataclasses.fields(group)
        if item.repr
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def per_process_flags() -> frozenset[str]:
    """Return the names of the flags in which the processes of a run may differ without a warning."""
    return frozenset(
        item.name for group in GROUPS for item in dataclasses.fields(group) if item.metadata["per_process"]
    )
