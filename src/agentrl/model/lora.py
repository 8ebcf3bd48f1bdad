"""LoRA adapters through peft: injected into the model, stored in checkpoints, merged for publication."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from agentrl.base.installation import how_to_install
from agentrl.config.training import AdapterConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.weights.delta import Rounding
from agentrl.weights.folder import (
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    is_adapter,
    layer_rank,
    layer_scale,
    read_adapter_config,
)
from agentrl.weights.snapshot import Part, model_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

NAME = "default"
_BASE = ".base_layer."
_SETTINGS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Settings that an adapter must share with the flags to be trained on."""


def add_adapter(model: PreTrainedModel, config: AdapterConfig, base: Path, saved: Path | None) -> Adapter:
    """Inject adapters into ``model`` and freeze its own weights; ``saved`` is a checkpoint's adapter folder.

    Adapters are float32. New ones leave the model's output unchanged until they are trained. Raises
    ConfigError without peft, for target modules that do not exist, and for a checkpoint without this adapter.
    """
    peft = _peft()
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    try:
        peft.inject_adapter_in_model(settings, model, adapter_name=NAME)
    except ValueError as error:
        raise ConfigError(
            f"--lora_target_modules {config.lora_target_modules} matches no layer of the model: {error}",
            hint="give all-linear, or names such as q_proj,v_proj",
        ) from error
    for name, parameter in model.named_parameters():
        if ".lora_" in name:  # peft takes the dtype of the layer, which small updates would not change
            parameter.data = parameter.data.float()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"--lora_target_modules {config.lora_target_modules} includes the model's output head",
            hint="leave lm_head out: logprobs are computed from its weight",
        )
    adapter = Adapter(model, settings)
    names = config.target_modules if isinstance(config.target_modules, list) else []
    unknown = [
        name for name in names if not any(f".{layer}".endswith(f".{name}") for layer in adapter.layers)
    ]
    if unknown:
        raise ConfigError(
            f"--lora_target_modules {','.join(unknown)} matches no layer of the model",
            hint="give all-linear alone, or names such as q_proj,v_proj",
        )
    if saved is not None:
        adapter.load(saved)
    trained = sum(parameter.numel() for _, parameter in adapter.named_parameters())
    logger.info("%d adapters of rank %d: %d trainable parameters", len(adapter.layers), settings.r, trained)
    return adapter


@dataclass(frozen=True)
class Adapter:
    """The adapters of ``model``; a WeightSource that a checkpoint stores in peft's own files."""

    model: PreTrainedModel
    settings: Any
    """peft's LoraConfig."""
    rounding: Rounding = field(default_factory=Rounding)
    """What rounding left of Δ in the weights that were merged since it was last taken."""

    @property
    def layers(self) -> dict[str, Any]:
        """Layers with an adapter, by module name."""
        layer_type = _peft().tuners.lora.LoraLayer
        return {name: layer for name, layer in self.model.named_modules() if isinstance(layer, layer_type)}

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters' parameters with their names."""
        return ((name, value) for name, value in self.model.named_parameters() if ".lora_" in name)

    def parts(self) -> Iterator[Part]:
        """Yield the adapters' weights, as a checkpoint holds them."""
        return (Part(name, tensor, tensor.detach) for name, tensor in self.weights().items())

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``tensors`` under their names in peft's files."""
        return {PEFT_PREFIX + name: value for name, value in tensors.items()}

    def configuration(self) -> dict[str, bytes]:
        """Return the content of ``adapter_config.json``."""
        with tempfile.TemporaryDirectory() as scratch:
            self.settings.save_pretrained(scratch)
            return {path.name: path.read_bytes() for path in Path(scratch).iterdir()}

    def load(self, folder: Path) -> None:
        """Load what a checkpoint holds; ConfigError for another adapter, or for none."""
        if not is_adapter(folder):
            raise ConfigError(
                f"{folder} holds whole weights, and --lora_rank {self.settings.r} trains an adapter",
                hint="leave --lora_rank out, or start another run from these weights",
            )
        found, weights = read_adapter(folder)
        own = {key: getattr(self.settings, key) for key in _SETTINGS}
        differing = [key for key, value in own.items() if found.get(key) not in (value, None)]
        if differing:
            listed = ", ".join(f"{key} {found[key]}, not {own[key]}" for key in differing)
            raise ConfigError(
                f"the adapter in {folder} has {listed}",
                hint="give the flags that it was trained with; what has no flag can be merged:"
                " python -m agentrl.model.merge_adapter ADAPTER BASE TARGET",
            )
        expected = self.weights()
        # A published adapter of these layers lacks those that were never trained: they add nothing.
        lacks = weights.keys() < expected.keys() and set(found["target_modules"]) == set(
            self.settings.target_modules
        )
        if weights.keys() != expected.keys() and not lacks:
            raise ModelError(
                f"the adapter in {folder} has {len(weights)} tensors for other layers than the"
                f" {len(expected)} of this model",
                hint="give the --lora_target_modules and the --model_name_or_path that it was trained with",
            )
        _peft().set_peft_model_state_dict(self.model, weights, adapter_name=NAME)

    def weights(self) -> dict[str, Tensor]:
        """Return the adapters' weights, by module: peft's files put ``PEFT_PREFIX`` before these names."""
        weights: dict[str, Tensor] = _peft().get_peft_model_state_dict(
            self.model, adapter_name=NAME, save_embedding_layers=False
        )
        return weights

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters for the length of the block: the model is then the base model."""
        layers = list(self.layers.values())
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def merged_parts(self, dtype: torch.dtype | None = None) -> Iterator[Part]:
        """Yield the model's tensors with the adapters added, under the names of the plain model.

        Each is computed when it is made, in float32; the model itself is unchanged. ``rounding`` sums what
        rounding to ``dtype``, if given, leaves of the adapters.
        """
        layers = self.layers
        for part in model_parts(self.model):
            if ".lora_" in part.name:
                continue
            owner, _, kind = part.name.partition(_BASE)
            name = part.name.replace(_BASE, ".")
            if kind == "weight" and owner in layers:
                yield Part(name, part.like, partial(self._merge, part.like, layers[owner], dtype))
            else:
                yield replace(part, name=name)

    @torch.no_grad()
    def _merge(self, weight: Tensor, layer: Any, dtype: torch.dtype | None) -> Tensor:
        weight, delta = weight.float(), layer.get_delta_weight(NAME).float()
        merged: Tensor = weight + delta
        if dtype is not None:
            self.rounding.add(delta, merged.to(dtype).float() - weight)
        return merged


@dataclass(frozen=True)
class ServedAdapter:
    """What engines load of an adapter: a WeightSource in the dtype in which the trainer multiplies it."""

    adapter: Adapter

    def parts(self) -> Iterator[Part]:
        """Yield the adapter's weights."""
        dtype = self.adapter.model.dtype
        for part in self.adapter.parts():
            yield replace(part, like=torch.empty(part.like.shape, dtype=dtype, device="meta"))

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``tensors`` under their names in peft's files.

        Layers whose B is 0, such as frozen ones, add nothing and are left out, unless that is all of them.
        """
        changed = {name for name, value in tensors.items() if ".lora_B." not in name or value.any()}
        kept = [name for name in tensors if {name, name.replace(".lora_A.", ".lora_B.")} <= changed]
        return self.adapter.convert({name: tensors[name] for name in kept or tensors})

    def configuration(self) -> dict[str, bytes]:
        """Return the content of ``adapter_config.json``."""
        return self.adapter.configuration()


@dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one linear layer: y = W x + scale · B (A x)."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float


def read_layers(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LayerAdapter]:
    """Return the adapter in ``folder`` by linear layer, for a model whose layers have ``shapes``.

    A shape is (outputs, inputs). Layers whose B is 0 add nothing and are left out. Raises ModelError if the
    files cannot be read, name a layer that the model lacks, or describe more than LoRA.
    """
    config, tensors = read_adapter(folder)
    layers: dict[str, LayerAdapter] = {}
    for key in (key for key in tensors if ".lora_A." in key):
        layer = key.rpartition(".lora_A.")[0]
        a, b = tensors[key], tensors[key.replace(".lora_A.", ".lora_B.")]
        rank = layer_rank(config, layer)
        outputs, inputs = shapes.get(layer, (0, 0))
        if a.shape != (rank, inputs) or b.shape != (outputs, rank):
            raise ModelError(
                f"the adapter in {folder} does not fit the model: {layer} with rank {rank}, A {list(a.shape)}"
                f" and B {list(b.shape)}; the layer is {shapes.get(layer, 'missing')}"
            )
        if b.any():
            layers[layer] = LayerAdapter(a, b, layer_scale(config, layer))
    return layers


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return peft's settings of the adapter in ``folder``, and its weights on the CPU, by module.

    Raises ModelError if a file cannot be read, or describes more than LoRA.
    """
    config = read_adapter_config(folder)
    try:
        weights = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{folder} holds no adapter that can be read: {ADAPTER_WEIGHTS}: {error}",
            hint="give another checkpoint",
        ) from error
    weights = {name.removeprefix(PEFT_PREFIX): value for name, value in weights.items()}
    single = next((name for name in weights if _partner(name) not in weights), None)
    if single is not None:
        raise ModelError(
            f"the adapter in {folder} has a tensor {single}; LoRA has pairs of lora_A and lora_B only",
            hint="give the adapter as peft saved it",
        )
    return config, weights


def _partner(name: str) -> str | None:
    """Return the name of B beside A, or of A beside B; None for another tensor."""
    owner, kind, rest = name.rpartition(".lora_A.")
    if kind:
        return f"{owner}.lora_B.{rest}"
    owner, kind, rest = name.rpartition(".lora_B.")
    return f"{owner}.lora_A.{rest}" if kind else None


def _peft() -> ModuleType:
    try:
        import peft
        import peft.tuners.lora
    except ImportError as error:
        raise ConfigError(
            f"--lora_rank needs the package peft: {error}", hint=how_to_install("trainer")
        ) from error
    module: ModuleType = peft
    return module
