"""Read a model without its weights, check what the trainer can do with it, and count its weights by part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from agentrl.config.load import Configs
from agentrl.config.schema import AdapterConfig, LossConfig, ModelConfig
from agentrl.distributed.expert_parallel import find_experts
from agentrl.distributed.mesh import Layout
from agentrl.distributed.pipeline_stages import assign_model_layers
from agentrl.errors import ConfigError, ModelError
from agentrl.losses.settings import LossSettings
from agentrl.model.attention.executor import MaskLimits, check_compatibility
from agentrl.model.flops import ModelShape
from agentrl.model.load import disable_dropout, empty_model
from agentrl.weights.folder import read_config


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
    module = _empty(folder, trust_remote_code)
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", None)
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
        config=module.config,
        module=module,
        shape=ModelShape.of(module.config),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        expert_parameters=experts,
        context=limit,
        alone=MaskLimits.of(module).reason(context),
    )


def reference_parameters(configs: Configs, model: PlannedModel) -> int:
    """Return the numbers in the reference model of the loss; 0 if the run needs no model of its own.

    Raises ModelError for a ``--reference_model`` without a model.
    """
    config = configs[ModelConfig]
    if not LossSettings.of(configs[LossConfig]).needs_reference:
        return 0
    if config.reference_model is None:
        return 0 if configs[AdapterConfig].lora_rank else model.parameters
    folder = Path(config.reference_model)
    module = _empty(folder, config.trust_remote_code, flag="--reference_model")
    return sum(parameter.numel() for parameter in module.parameters())


def _empty(folder: Path, trust_remote_code: bool, flag: str = "--model") -> Any:
    """Return the model in ``folder`` on the meta device. Raises ModelError."""
    if not folder.is_dir():
        raise ModelError(
            f"{flag} {folder} is not a folder",
            hint="give a local Hugging Face folder; its config.json is enough",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", hint="give a folder that save_pretrained wrote")
    config = read_config(folder)
    if config.get("vision_config") is not None:
        raise ModelError(
            f"{folder} holds a vision-language model ({config.get('model_type')}), which cannot be planned",
            hint="images are trained in one process (docs/vision.md): measure a step there",
        )
    return empty_model(folder, ModelConfig(trust_remote_code=trust_remote_code), torch.float32)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The weights of a part of the model: how many, and how many of them are trained."""

    dense: int = 0
    experts: int = 0
    trained: int = 0
    trained_experts: int = 0

    @classmethod
    def of(cls, named: Iterable[tuple[str, nn.Parameter]], experts: Iterable[str]) -> Self:
        """Count parameters, those of modules called ``experts`` apart."""
        prefixes = tuple(f"{name}." for name in experts)
        dense = expert = trained = trained_expert = 0
        for name, parameter in named:
            size, is_expert = parameter.numel(), name.startswith(prefixes) if prefixes else False
            dense += size * (not is_expert)
            expert += size * is_expert
            trained += size * (parameter.requires_grad and not is_expert)
            trained_expert += size * (parameter.requires_grad and is_expert)
        return cls(dense, expert, trained, trained_expert)

    def local(self, layout: Layout) -> Numbers:
        """Return those of a rank before FSDP2 shards them: tensor and expert parallelism divide them."""
        tp, holders = layout.tp, layout.tp * layout.ep
        return Numbers(
            self.dense // tp, self.experts // holders, self.trained // tp, self.trained_experts // holders
        )

    def sharded(self, layout: Layout) -> tuple[float, float]:
        """Return a rank's shard of all, and of the trained ones."""
        dense, experts = layout.shard, layout.dp_shard * layout.cp
        return (
            self.dense / dense + self.experts / experts,
            self.trained / dense + self.trained_experts / experts,
        )

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(
            self.dense + other.dense, self.experts + other.experts, self.trained + other.trained,
            self.trained_experts + other.trained_experts,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelNumbers:
    """What the memory of a step depends on in a causal LM: its weights by part, its norms, its experts."""

    module: Any
    shape: ModelShape
    layers: tuple[Numbers, ...]
    embedding: Numbers
    """With what else is outside the layers and the head."""
    head: Numbers
    """Zeros if the head is the embedding."""
    largest: int
    """Numbers of the largest trained parameter."""
    trains_head: bool
    norms: int
    """Norms of the hidden width in a layer."""
    norms_heads: bool
    """Queries and keys are normalized."""
    norm: str
    """The class of these norms."""

    @classmethod
    def of(cls, module: Any) -> Self:
        """Read a causal LM, also on the meta device, with its adapters and frozen parameters."""
        shape, decoder = ModelShape.of(module.config), module.get_decoder()
        whole = list(module.named_parameters())
        listed = getattr(decoder, "layers", None)
        found = listed if isinstance(listed, nn.ModuleList) else ()
        layers = [Numbers.of(layer.named_parameters(), find_experts(layer)) for layer in found]
        total = Numbers.of(whole, find_experts(module))
        weight = module.get_output_embeddings().weight
        is_tied = weight is module.get_input_embeddings().weight
        head = Numbers() if is_tied else Numbers.of((("head", weight),), ())
        if not layers:  # its layers have another name: all alike
            size, count = total.dense - head.dense - shape.vocabulary * shape.hidden, shape.layers
            layers = [Numbers(size // count, 0, size * total.trained // (total.dense * count))] * count
        inside = sum(layers, head)
        norms = [(name, item) for name, item in (found[0] if found else decoder).named_modules()
                 if "norm" in name.lower() and getattr(item, "weight", None) is not None]  # fmt: skip
        return cls(
            module=module, shape=shape, layers=tuple(layers),
            embedding=Numbers(total.dense - inside.dense, 0, total.trained - inside.trained), head=head,
            largest=max((item.numel() for _, item in whole if item.requires_grad), default=0),
            trains_head=weight.requires_grad,
            norms=sum(item.weight.numel() == shape.hidden for _, item in norms) if found else 2,
            norms_heads=any(name.endswith("q_norm") for name, _ in norms),
            norm=type(norms[0][1]).__name__ if norms else "RMSNorm",
        )  # fmt: skip

    def stages(self, layout: Layout) -> list[range]:
        """Return the layers of each pipeline stage."""
        return [range(len(self.layers))] if layout.pp == 1 else assign_model_layers(self.module, layout.pp)
