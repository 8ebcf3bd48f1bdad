"""Read a model's configuration, build it without storage, and check what the trainer can do with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.config.load import Configs
from agentrl.config.schema import AdapterConfig, LossConfig, ModelConfig
from agentrl.distributed.expert_parallel import find_experts
from agentrl.errors import ConfigError, ModelError
from agentrl.model.attention.compatibility import MaskLimits, check_compatibility
from agentrl.model.flops import ModelShape
from agentrl.model.load import disable_dropout


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A causal LM on the meta device: its shapes, without weights."""

    folder: Path
    config: Any
    module: Any
    shape: ModelShape
    parameters: int
    """Numbers in the whole model."""
    expert_parameters: int
    """Those of them in experts."""
    context: int | None
    """Positions that the configuration declares; None if it declares none."""
    alone: str | None
    """Why each sequence runs alone, without merged prefixes; None if an attention mask is exact."""


def open_model(folder: Path, context: int, *, trust_remote_code: bool = False) -> PlannedModel:
    """Read the configuration in ``folder``, and check it for trajectories of ``context`` tokens.

    Raises ModelError for a folder without a model and for a model that cannot be trained, ConfigError for a
    context beyond the model's.
    """
    config = _read_config(folder, trust_remote_code)
    module = _build(folder, config)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise ConfigError(
            f"--context {context} is longer than the model's context, max_position_embeddings {limit}",
            hint=f"give --context {limit} or less, or extend the model's rope scaling in its config.json",
        )
    disable_dropout(module)
    check_compatibility(module)
    experts = sum(p.numel() for found in find_experts(module).values() for p in found.parameters())
    return PlannedModel(
        folder=folder,
        config=config,
        module=module,
        shape=ModelShape.of(config),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        expert_parameters=experts,
        context=limit,
        alone=MaskLimits.of(module).reason(context),
    )


def reference_parameters(configs: Configs, model: PlannedModel) -> int:
    """Return the numbers in the reference model of ``--kl_coef``; 0 if the run needs no model of its own.

    Raises ModelError for a ``--reference_model`` without a model.
    """
    config = configs[ModelConfig]
    if configs[LossConfig].kl_coef == 0:
        return 0
    if config.reference_model is None:
        return 0 if configs[AdapterConfig].lora_rank else model.parameters
    folder = Path(config.reference_model)
    module = _build(folder, _read_config(folder, config.trust_remote_code, flag="--reference_model"))
    return sum(parameter.numel() for parameter in module.parameters())


def _read_config(folder: Path, trust_remote_code: bool, flag: str = "--model") -> Any:
    from transformers import AutoConfig

    if not folder.is_dir():
        raise ModelError(
            f"{flag} {folder} is not a folder",
            hint="give a local Hugging Face folder; its config.json is enough",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", hint="give a folder that save_pretrained wrote")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder}/config.json cannot be read: {str(error).splitlines()[0]}",
            hint="check the file; code of its own needs --trust_remote_code true",
        ) from error
    if getattr(config, "vision_config", None) is not None:
        raise ModelError(
            f"{folder} holds a vision-language model ({config.model_type}), which cannot be planned",
            hint="images are trained in one process (docs/vision.md): measure a step there",
        )
    return config


def _build(folder: Path, config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return model_class.from_config(config, attn_implementation="sdpa")
    except (ValueError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise ModelError(
            f"no causal language model can be built from {folder}/config.json: {str(error).split('. ')[0]}",
            hint="use an architecture that transformers has with sdpa attention",
        ) from error
