"""Read the settings of a LoRA adapter in peft's files, and refuse by name what AgentRL does not apply.

Everything that reads an adapter comes through here: the trainer, the local engine and the merge into whole
weights. Other engines get adapters that AgentRL trained, or merged weights.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from agentrl.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which peft's folder of an adapter is recognized."""
_APPLIED = frozenset(("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"))
_SELECT = frozenset(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"))
"""Which layers have an adapter: the names of the tensors say so too."""
_WITHOUT_EFFECT = frozenset(
    ("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
     "inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config")
)  # fmt: skip
"""Fields without effect on a stored adapter; the last three have one only with a setting that is refused."""
_UNSET: tuple[Any, ...] = (None, False, "none", {}, [])
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base model's weights as they are. The others, such as PiSSA, change them."""


def is_adapter(folder: Path) -> bool:
    """Return whether ``folder`` holds an adapter instead of a model's weights."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of peft's ``adapter_config.json``: r, lora_alpha and target_modules are in it.

    Raises ModelError if it cannot be read, describes no LoRA, or sets anything that ``layer_scale`` and the
    product of B and A do not express, such as DoRA.
    """
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        is_lora = config.get("peft_type") in (None, "LORA") and bool(set(config["target_modules"]))
        if not is_lora or config["r"] < 1 or config["lora_alpha"] < 0:
            raise ValueError("it describes no LoRA")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{folder} holds no adapter that can be read: {ADAPTER_CONFIG}: {error}",
            hint="give a LoRA adapter in peft's files",
        ) from error
    known = _APPLIED | _SELECT | _WITHOUT_EFFECT | {"init_lora_weights"}
    odd = [f"{key} {value!r}" for key, value in config.items() if key not in known and value not in _UNSET]
    if config.get("init_lora_weights") not in _STARTS:
        odd.append(f"init_lora_weights {config['init_lora_weights']!r}, which changes the base model")
    if odd:
        raise ModelError(
            f"the adapter in {folder} sets {', '.join(odd)}: AgentRL does not apply that",
            hint="merge it with peft (merge_and_unload, then save_pretrained), and give the merged folder",
        )
    return config


def layer_rank(config: dict[str, Any], layer: str) -> int:
    """Return the rank of the adapter of ``layer``, a module's name."""
    return int(_of_layer(config.get("rank_pattern"), layer, config["r"]))


def layer_scale(config: dict[str, Any], layer: str) -> float:
    """Return the factor of B·A in ``layer``, as peft computes it."""
    rank, alpha = (
        layer_rank(config, layer),
        _of_layer(config.get("alpha_pattern"), layer, config["lora_alpha"]),
    )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_layer(patterns: dict[str, Any] | None, layer: str, default: Any) -> Any:
    """Return the value of the first of peft's patterns that matches: a regular expression of a name's end."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", layer))
    return next(found, default)
