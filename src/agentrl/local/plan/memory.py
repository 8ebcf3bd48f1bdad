"""The memory of a rank in a training step, in closed forms, of a model that is read without its weights.

The forms describe a decoder of attention with rotary positions, norms, and a gated feed-forward layer or
experts, as the trainer runs it: FSDP2 gathers a layer's weights in the dtype of products and the next layer's
ahead, keeps embedding and head gathered, and adds gradients in the dtype of the weights. ``tests/fake_gpu``
and ``scripts/bench/plan.py`` hold them within 10 % of simulated and of real steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from agentrl.chat.model_folder import model_context_length
from agentrl.config.load import Configs
from agentrl.config.schema import AdapterConfig, CriticConfig, LossConfig, MemoryConfig, ModelConfig
from agentrl.distributed.expert_parallel import find_experts
from agentrl.distributed.mesh import Layout
from agentrl.distributed.pipeline_stages import assign_model_layers
from agentrl.errors import ConfigError, ModelError
from agentrl.losses.settings import LossSettings
from agentrl.model.attention import MaskLimits, check_compatibility, check_positions
from agentrl.model.flops import ModelShape, Precision
from agentrl.model.load import disable_dropout, empty_model
from agentrl.model.logprobs import ForwardOptions
from agentrl.model.norms import fuse_norms, is_fused
from agentrl.train.build import Checkpointing
from agentrl.weights.folder import read_config, require_config


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
    limit = model_context_length(folder)
    if limit is not None and context > limit:
        raise ConfigError(
            f"--context {context} is longer than the model's context of {limit}",
            hint=f"give --context {limit} or less, or extend the model's rope scaling in its config.json",
        )
    disable_dropout(module)
    fuse_norms(module)
    check_compatibility(module)
    check_positions(module, context)
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


def critic_parameters(configs: Configs, model: PlannedModel) -> int:
    """Return the numbers in the critic's own model; 0 without one, and of a head, which is tiny.

    Raises ModelError for a ``--critic_model`` without a model.
    """
    config = configs[CriticConfig]
    if config.critic != "model":
        return 0
    if config.critic_model is None:
        return model.parameters
    module = _empty(Path(config.critic_model), configs[ModelConfig].trust_remote_code, flag="--critic_model")
    return sum(parameter.numel() for parameter in module.parameters())


def _empty(folder: Path, trust_remote_code: bool, flag: str = "--model") -> Any:
    """Return the model in ``folder`` on the meta device. Raises ModelError."""
    require_config(folder, flag)
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
    is_fused: bool
    """A GPU runs these norms as one kernel."""

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
            is_fused=any(is_fused(item) for _, item in norms),
        )  # fmt: skip

    def stages(self, layout: Layout) -> list[range]:
        """Return the layers of each pipeline stage."""
        return [range(len(self.layers))] if layout.pp == 1 else assign_model_layers(self.module, layout.pp)


PARTS = (
    "parameters", "gradients", "optimizer states", "gathered parameters", "activations", "logits and loss",
    "backward", "reference model",
)  # fmt: skip
"""Parts of the peak. ``backward`` is temporary: a layer that is computed again, and gradients under way."""
_SMALL = 64
"""Bytes per token and layer of what is as narrow as a head or one number."""
_STRIPES = 1.125
"""A block of logits, and the eighth of it that is exponentiated at a time."""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One optimizer update, as far as its memory depends on it."""

    config: Any
    """The model's Hugging Face configuration."""
    precision: Precision
    max_tokens: int
    """Tokens of a micro-batch."""
    trained_tokens: int
    """Trainable tokens of a micro-batch that are projected at once."""
    micro_batches: int = 1
    """Micro-batches that a rank runs in the update."""
    checkpointing: Checkpointing = "none"
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    options: ForwardOptions = field(default_factory=ForwardOptions)
    reference: float = 0.0
    """Numbers in a reference model, as a multiple of the model's."""
    critic: float = 0.0
    """Numbers in a critic's own model, which is trained and sharded like the policy, as a multiple of it."""
    fused_norms: bool = True
    """Norms run as one kernel: AMD's GPUs and CPUs run several."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the peak of a step."""

    peak: int
    parts: Mapping[str, int]
    """By ``PARTS``; they add up to ``peak``."""
    phase: str
    """What runs at the peak."""


def measure_step(model: ModelNumbers, spec: StepSpec, layout: Layout) -> RankMemory:
    """Return the memory of the rank that needs most; of the pipeline's stages, the first or the last does."""
    stages = sorted({0, layout.pp - 1})
    return max((_Rank(model, spec, layout, stage).peak() for stage in stages), key=lambda rank: rank.peak)


class _Rank:
    """One rank of a pipeline stage, which all forms are about."""

    def __init__(self, model: ModelNumbers, spec: StepSpec, layout: Layout, stage: int) -> None:
        self._model, self._spec, self._layout, self._stage = model, spec, layout, stage
        self._shape, self._wide = model.shape, spec.precision.products.itemsize
        self._uses_fsdp = layout.uses_fsdp or spec.precision.policy is not None
        self._is_last = stage == layout.pp - 1
        self._norms_once = spec.fused_norms and model.is_fused
        self._layers = [model.layers[index].local(layout) for index in model.stages(layout)[stage]]
        has_embedding = stage == 0 or (self._is_last and not model.head.dense)
        ends = (model.embedding, has_embedding), (model.head, self._is_last)
        self._root = sum((part for part, is_here in ends if is_here), Numbers()).local(layout)
        self._tokens = spec.max_tokens / layout.cp
        self._rows = self._tokens * self._chosen / layout.tp if self._experts else 0.0
        """Pairs of a token and an expert."""

    @property
    def _experts(self) -> bool:
        return any(layer.experts for layer in self._layers)

    @property
    def _chosen(self) -> int:
        return int(getattr(self._spec.config.get_text_config(), "num_experts_per_tok", 0) or 0)

    def peak(self) -> RankMemory:
        """Return the largest sum of its phases: the loss, the backward of a layer, the optimizer step."""
        spec, layout = self._spec, self._layout
        held = self._held()
        before = held if spec.micro_batches > 1 else {**held, "gradients": 0.0}  # of the first micro-batch
        gathered, layer = self._gathered()
        ahead = layer if len(self._layers) > 1 and layout.shard > 1 else 0.0
        is_recomputed = spec.checkpointing != "none"
        kept = self._kept()
        stage_kept = len(self._layers) * kept
        flight = (min(layout.pp - self._stage, spec.micro_batches) - 1) * stage_kept
        backward = {
            "gathered parameters": gathered + layer,
            "backward": (self._saved() if is_recomputed else 0.0) + self._work() + ahead + self._reduced(),
        }
        phases = {
            "optimizer step": held,
            "backward": {
                **before, **backward, "gradients": before["gradients"] + self._head_gradient(),
                "activations": flight + stage_kept - (kept if is_recomputed else 0.0),
            },
            "end of the backward": {**held, **backward, "activations": 0.0 if is_recomputed else kept},
        }  # fmt: skip
        if self._is_last:
            widths = 2 * self._wide + (0 if self._norms_once else 4)
            final_norm = self._tokens * self._shape.hidden * widths
            phases["logits and loss"] = {
                **before, "gathered parameters": gathered, "logits and loss": self._loss() + ahead,
                "activations": flight + stage_kept + final_norm,
            }  # fmt: skip
        phase = max(phases, key=lambda name: sum(phases[name].values()))
        parts = {name: int(size) for name, size in phases[phase].items()}
        return RankMemory(sum(parts.values()), parts, phase)

    def _held(self) -> dict[str, float]:
        """Return what the rank holds through the step."""
        spec, layout = self._spec, self._layout
        weight = spec.precision.weights.itemsize
        total = sum(self._layers, self._root)
        numbers, trained = total.sharded(layout)
        parameters, numbers_of_gradients = numbers * weight, trained
        if spec.adapter.lora_rank:  # the model's own weights have the dtype of products, adapters float32
            parameters = (numbers - trained) * self._wide + trained * weight
        is_reduced_last = spec.memory.gradient_reduction != "every" and layout.uses_fsdp
        if is_reduced_last and spec.micro_batches > 1:
            numbers_of_gradients = total.trained + total.trained_experts
        moments = 2 * trained * weight
        if spec.memory.optimizer_offload:  # those of one parameter at a time
            moments = min(moments, 2 * weight * self._model.largest / (layout.tp * layout.shard))
        models = 1 + spec.critic
        return {
            "parameters": models * parameters,
            "gradients": models * numbers_of_gradients * weight,
            "optimizer states": models * moments,
            "reference model": spec.reference * numbers * self._wide,
        }

    def _gathered(self) -> tuple[float, float]:
        """Return the bytes of gathered embedding and head, and those of a gathered layer."""
        if not self._uses_fsdp:
            return 0.0, 0.0
        largest = max(self._layers, key=lambda layer: layer.dense + layer.experts)
        layer = (largest.dense + largest.experts) * self._wide if self._layout.shard > 1 else 0.0
        return self._root.dense * self._wide, layer

    def _kept(self) -> float:
        """Return the bytes of a layer's activations that stay until its backward."""
        if self._spec.checkpointing == "none":
            return self._saved() + self._gathered_keys()
        on_host = self._spec.memory.activation_offload
        inputs = 0.0 if on_host else self._tokens * self._shape.hidden * self._wide
        return inputs + (self._products() if self._spec.checkpointing == "selective" else 0.0)

    def _products(self) -> float:
        """Return the bytes of the results of a layer's products, which selective checkpointing keeps."""
        heads, kv_heads, ffn = self._widths()
        per_token = 2 * heads + 2 * kv_heads + self._shape.hidden * (1 if self._experts else 2) + 2 * ffn
        rows = self._rows * (self._expert_width() * 2 + self._shape.hidden)
        return (self._tokens * per_token + rows) * self._wide

    def _saved(self) -> float:
        """Return the bytes that a layer saves for its backward without checkpointing.

        A norm saves its input in float32 and, if it is trained, its normalized input; Gemma's saves both in
        float32, LayerNorm and a fused one their input alone. Products save their inputs, attention queries,
        keys, values and its result, a gated layer both factors and their product.
        """
        shape, wide = self._shape, self._wide
        heads, kv_heads, ffn = self._widths()
        norm = 4 + (0 if self._spec.adapter.lora_rank else 4 if "Gemma" in self._model.norm else wide)
        if self._model.norm == "LayerNorm" or self._norms_once:
            norm = wide
        normed = self._model.norms * shape.hidden + (heads + kv_heads if self._model.norms_heads else 0)
        attention = 2 * shape.hidden + 3 * heads + 2 * kv_heads
        gates = 4 if shape.gated else 2
        per_token = norm * normed + wide * (attention + gates * ffn) + _SMALL
        # Rows of experts that ranks split are copied to be sent or added up.
        copies = 2.5 if self._layout.ep > 1 else 1.5 if self._layout.tp > 1 else 0.0
        per_row = shape.hidden * (1 + copies) + 4 * self._expert_width()
        return self._tokens * per_token + self._rows * wide * per_row

    def _work(self) -> float:
        """Return the bytes of the gradients under way in the backward of a layer."""
        shape, layout, wide = self._shape, self._layout, self._wide
        _, kv_heads, ffn = self._widths()
        size = self._tokens * (2 * ffn + shape.hidden) + self._rows * (
            2 * self._expert_width() + shape.hidden
        )
        if self._experts:
            size += max(layer.trained_experts for layer in self._layers) / 3
        if layout.tp > 1:  # sums over ranks, and the gradient of a norm that is several kernels
            size += (2 if self._norms_once else 3) * self._tokens * shape.hidden
        if layout.cp > 1:  # gathered keys and values, and their gradients
            size += 6 * self._spec.max_tokens * kv_heads
        if layout.pp > 1:  # received and sent hidden states
            size += 2 * self._tokens * shape.hidden
        return size * wide

    def _reduced(self) -> float:
        """Return the bytes of the last layer's gradients, which FSDP2 is still reducing."""
        if not self._uses_fsdp or len(self._layers) < 2:
            return 0.0
        is_split = self._layout.ep * self._layout.tp > 1
        trained = [layer.trained + (0 if is_split else layer.trained_experts) for layer in self._layers]
        return max(trained) * self._spec.precision.weights.itemsize

    def _loss(self) -> float:
        """Return the bytes of a block of logits and of the head's gradient, both float32."""
        spec, shape, layout = self._spec, self._shape, self._layout
        tokens = spec.trained_tokens / layout.cp
        width = min(shape.vocabulary / layout.tp, spec.options.vocab_chunk_size)
        blocks = _STRIPES + spec.options.entropy_gradient
        if getattr(spec.config.get_text_config(), "final_logit_softcapping", None):
            blocks += 1
        gradient = shape.vocabulary / layout.tp * shape.hidden if self._model.trains_head else 0.0
        if layout.tp > 1:  # once more as a DTensor
            gradient *= 2
        return 4 * (tokens * (width * blocks + 1.5 * shape.hidden) + gradient)

    def _head_gradient(self) -> float:
        """Return the bytes of the head's gradient, which waits for that of the embedding to be reduced."""
        if not (self._is_last and self._model.trains_head and self._uses_fsdp):
            return 0.0
        return self._shape.vocabulary / self._layout.tp * self._shape.hidden * self._wide

    def _gathered_keys(self) -> float:
        """Return the bytes of keys and values of all tokens that FlexAttention keeps."""
        if self._layout.cp == 1 or self._wide == 4:
            return 0.0
        return 2 * self._spec.max_tokens * self._widths()[1] * self._wide

    def _widths(self) -> tuple[float, float, float]:
        """Return a rank's width of queries, of keys, and of a feed-forward layer or the shared experts."""
        shape, tp = self._shape, self._layout.tp
        ffn = shape.ffn - (self._chosen * self._expert_width() if self._experts else 0)
        return shape.heads * shape.head_dim / tp, shape.kv_heads * shape.head_dim / tp, ffn / tp

    def _expert_width(self) -> float:
        config = self._spec.config.get_text_config()
        return float(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
