"""Load a model and its tokenizer from a Hugging Face folder, with weights or empty, on the meta device."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.utils import logging as transformers_logging

from agentrl.config.schema import AdapterConfig, ModelConfig
from agentrl.errors import ModelError, first_line
from agentrl.model.flops import Precision
from agentrl.model.lora import Adapter, ServedAdapter, add_adapter
from agentrl.model.norms import fuse_norms
from agentrl.model.vision import PixelReader, reads_images
from agentrl.weights.folder import base_folder, is_adapter, read_config, stored_dtype
from agentrl.weights.snapshot import PublishedModel, WeightSource, model_parts

_LISTED = 3

ONE_BUILD = threading.RLock()
"""Held by a thread that builds a transformers model. ``from_pretrained`` replaces ``tie_weights`` of all
classes and torch's default dtype meanwhile: a second thread would restore what the first one had put there,
and no later model of the process would have tied weights."""


def check_report(where: str, model: Any, report: Mapping[str, Any]) -> None:
    """Raise ModelError unless ``from_pretrained``, by its loading ``report``, loaded what ``where`` holds."""
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    check_names(where, model, model.state_dict().keys(), missing, report["unexpected_keys"])
    # transformers unties what differs. Engines read config.json instead, and skip the separate head.
    declared = model.get_expanded_tied_weights_keys(all_submodels=True).keys()
    if untied := declared - model.all_tied_weights_keys.keys():
        raise ModelError(
            f"the weights in {where} cannot be loaded: {tied_apart(min(untied))}",
            hint="set tie_word_embeddings to false if the head is the model's own; else delete it",
        )


def check_names(
    where: str, model: Any, known: Collection[str], missing: Collection[str], unused: Collection[str]
) -> None:
    """Raise ModelError if a tensor of ``model`` is in no file, or if one of the files belongs into the model.

    ``known`` are the tensors of the model or of its stage, ``missing`` those of them that no file has, and
    ``unused`` the other tensors of the files. A whole layer may be unused, such as one that predicts further
    tokens; a bias or a scale beside a weight may not, nor one of more layers than config.json counts.
    """
    kind = type(model).__name__
    if missing:
        others = f"; they have {_listed(unused)} instead" if unused else ""
        raise ModelError(
            f"the weights in {where} lack {len(missing)} tensors of {kind}: {_listed(missing)}{others}",
            hint="give a folder that holds the whole model, with the names of its architecture",
        )
    if getattr(model.config, "quantization_config", None) is not None:
        return  # the quantizer has read scales and packed values
    config = model.config.get_text_config()
    predicting = getattr(config, "num_nextn_predict_layers", None) or 0
    layers = config.num_hidden_layers + predicting  # transformers has no modules for the latter
    owners = {name.rpartition(".")[0] for name in known}
    modules = {owner[:end] for owner in owners for end in _ends(owner)}
    left_out = []
    for name in unused:
        nearest = name[: max((end for end in _ends(name) if name[:end] in modules), default=0)]
        part = name.removeprefix(nearest).lstrip(".").partition(".")[0]
        if nearest in owners or (nearest and part.isdigit() and int(part) >= layers):
            left_out.append(name)
    if left_out:
        raise ModelError(
            f"{kind} leaves out {len(left_out)} tensors that {where} holds: {_listed(left_out)}",
            hint="correct config.json: its number of layers, its biases, its quantization",
        )


def tied_apart(name: str) -> str:
    """Return what is wrong with files that hold a tied tensor ``name`` with values of its own."""
    return f"{name} is tied to another parameter by config.json, and the files hold different values"


def _ends(name: str) -> list[int]:
    """Return where the name of each module around a tensor or module ends, itself included."""
    return [place for place, letter in enumerate(name) if letter == "."] + [len(name)]


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_LISTED]) + (", …" if len(names) > _LISTED else "")


@dataclass(frozen=True)
class Policy:
    """The model being trained, its tokenizer, and the base model's folder."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    base: Path
    chat_template: str | None
    """Content of ``--chat_template``; None for the tokenizer's own."""
    adapter: Adapter | None = None
    """The adapter that ``--lora_rank`` trains; the model's own weights are then frozen."""
    pixels: PixelReader | None = None
    """Reads images for a vision model; None for a model that reads text only."""
    source: Path | None = None
    """The folder of the model's own weights; None if they are from no folder."""
    own_dtype: torch.dtype | None = None
    """The dtype of the weights in ``base``, which published weights have; None: the one that is trained."""
    publishes_adapter: bool = False
    """Whether a version holds the adapter alone."""

    @property
    def served(self) -> WeightSource:
        """What a version holds."""
        if self.adapter is not None and self.publishes_adapter:
            return ServedAdapter(self.adapter)
        return self.published

    @property
    def published(self) -> PublishedModel:
        """The whole weights in the model's own dtype, with the adapter merged in."""
        if self.adapter is not None:
            parts = partial(self.adapter.merged_parts, self.own_dtype)
        else:
            parts = partial(model_parts, self.model)
        return PublishedModel(self.model, parts, self.own_dtype, self.base)

    def rounded_weights(self) -> dict[str, Tensor]:
        """Return the trained weights that publication rounds, by name: a checkpoint stores them, too."""
        own = self.own_dtype
        if own is None or self.adapter is not None:
            return {}
        trained = ((name, item) for name, item in self.model.named_parameters() if item.requires_grad)
        return {name: item for name, item in trained if torch.promote_types(item.dtype, own) != own}


def load_policy(
    config: ModelConfig,
    weights: Path | None = None,
    adapter: AdapterConfig | None = None,
    precision: Precision | None = None,
    *,
    is_empty: bool = False,
) -> Policy:
    """Load the policy for training, with weights from a checkpoint's folder ``weights`` or the base folder.

    If ``adapter`` has a rank above 0, ``weights`` are those of the adapter, and the model's own are held in
    the dtype of products. ``precision`` is by default that of ``--dtype``. With ``is_empty`` the model's own
    weights stay on the meta device, for ``load_shards`` to read them from ``Policy.source``. Dropout is set
    to 0, so that the trainer's logprobs match the engine's. Raises ModelError for a folder without tokenizer,
    chat template or known architecture.
    """
    base = base_folder(config)
    tokenizer, template = load_tokenizer(config, base)
    is_adapted = adapter is not None and adapter.lora_rank > 0
    if weights is not None and not is_adapted and is_adapter(weights):
        raise ModelError(f"{weights} holds an adapter", hint="give the --lora_rank that it was trained with")
    own_dtype = getattr(torch, stored_dtype(base))
    if precision is None:
        dtype = resolve_dtype(config.dtype)
    else:
        dtype = precision.products if is_adapted else precision.weights
    source = base if is_adapted else weights or base
    model = (empty_model if is_empty else load_model)(source, config, dtype)
    embedded = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if len(tokenizer) > embedded:
        raise ModelError(
            f"the tokenizer of {base} has {len(tokenizer)} ids, and the model embeds {embedded}",
            hint="resize the model's embeddings, or use the tokenizer that belongs to it",
        )
    disable_dropout(model)
    fuse_norms(model)
    pixels = PixelReader(base) if reads_images(model.config) else None
    if is_adapted and pixels is not None:
        raise ModelError(
            "--lora_rank with a vision model has not been tested",
            hint="leave it out, or freeze parts with --freeze",
        )
    added = None
    if adapter is not None and is_adapted:
        with placeholders(model) if is_empty else nullcontext():
            added = add_adapter(model, adapter, base, weights)
    return Policy(model, tokenizer, base, template, added, pixels, source, own_dtype)


def load_tokenizer(config: ModelConfig, folder: Path) -> tuple[PreTrainedTokenizerBase, str | None]:
    """Return the tokenizer with its chat template, and the content of ``--chat_template`` or None."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the tokenizer of {folder} cannot be loaded: {first_line(error)}",
            hint="check its tokenizer.json and tokenizer_config.json",
        ) from error
    template = _own_template(config)
    if template is not None:
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {folder} has no chat template",
            hint="give --chat_template FILE.jinja, or add chat_template.jinja to the folder",
        )
    return tokenizer, template


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout probability of the modules to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Set these too: attention passes them to a function, without a Dropout module.
        for name in ("attention_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def resolve_dtype(name: str) -> torch.dtype:
    """Return the dtype of trained weights that ``--dtype`` names; ``auto`` is float32."""
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_model(folder: Path, config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model in ``folder`` with its weights in ``dtype``; ModelError if it cannot be loaded whole."""
    model, report = load_as(_model_class(folder), folder, config, dtype)
    check_report(str(folder), model, report)
    return model


def load_as(
    kind: Any, folder: Path, config: ModelConfig, dtype: torch.dtype, **settings: Any
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Load ``folder`` by transformers' class ``kind``; return the model and what was not loaded.

    ``settings`` are fields of the configuration. Raises ModelError.
    """
    disable_progress_bar: Callable[[], None] = transformers_logging.disable_progress_bar
    disable_progress_bar()
    with ONE_BUILD, _explained(folder):
        model, report = kind.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **settings,
        )
    return cast(PreTrainedModel, model), report


def empty_model(folder: Path, config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return what ``load_model`` does, on the meta device: without reading weights."""
    return empty_as(_model_class(folder), folder, config, dtype)


def empty_as(
    kind: Any, folder: Path, config: ModelConfig, dtype: torch.dtype, **settings: Any
) -> PreTrainedModel:
    """Return the model of ``load_as`` on the meta device: without reading weights."""
    # Keep linspace off the meta device: models' own code may call .item() on its result.
    with ONE_BUILD, _explained(folder), torch.device("meta"), meta_device_safe_creation_ops():
        found = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=config.trust_remote_code, **settings
        )
        model = kind.from_config(
            found, dtype=dtype, attn_implementation="sdpa", trust_remote_code=config.trust_remote_code
        )
    kept = tuple(model._get_dtype_plan(dtype))  # names of what the model's class keeps in float32
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in kept):
            tensor.data = tensor.data.float()
    with _explained(folder):
        # Read it as from_pretrained does and from_config does not: versions are published with it.
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(folder))
        else:
            model.generation_config = GenerationConfig.from_pretrained(
                str(folder), config_file_name="config.json", _from_model_config=True
            )
    return cast(PreTrainedModel, model.eval())


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Raise a ModelError for an exception in the block, which loads the model in ``folder``."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"the model in {folder} cannot be loaded: {first_line(error)}",
            hint="check its config.json and weights; code of its own needs --trust_remote_code true",
        ) from error


def _model_class(folder: Path) -> Any:
    """Return the class that loads a language model, or one with a vision tower."""
    is_vision = "vision_config" in read_config(folder)
    return AutoModelForImageTextToText if is_vision else AutoModelForCausalLM


def _own_template(config: ModelConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"--chat_template {config.chat_template} cannot be read: {error}",
            hint="give an existing text file",
        ) from error


def is_empty(model: Any) -> bool:
    """Return whether ``model`` is on the meta device: it has no weights yet."""
    return bool(model.get_input_embeddings().weight.device.type == "meta")


@contextmanager
def placeholders(model: nn.Module) -> Iterator[None]:
    """Let the weights of an empty ``model`` look like weights on the CPU, one number each, in this block.

    What is added to the model in the block gets storage: adapters are created beside weights on the CPU.
    """
    slots = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    standing_in = {
        weight: nn.Parameter(torch.zeros(1, dtype=weight.dtype).expand(weight.shape), weight.requires_grad)
        for _, _, weight in slots
    }
    for module, name, weight in slots:
        setattr(module, name, standing_in[weight])
    try:
        yield
    finally:
        for module, name, weight in slots:
            setattr(module, name, weight.requires_grad_(standing_in[weight].requires_grad))


def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace every tensor of ``model`` on the meta device by one on ``device`` with undefined values.

    Of a DTensor each rank allocates its own part. Tied weights stay tied, and other tensors as they are.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False, remove_duplicate=False):
            if value.is_meta and id(value) not in made:
                made[id(value)] = nn.Parameter(torch.empty_like(value, device=device), value.requires_grad)
            if value.is_meta:
                setattr(module, name, made[id(value)])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta and id(buffer) not in made:
                made[id(buffer)] = torch.empty_like(buffer, device=device)
            if buffer.is_meta:
                setattr(module, name, made[id(buffer)])


def compute_buffers(model: Any, loaded: Iterable[Tensor]) -> None:
    """Compute the tensors that no checkpoint has, such as rotary frequencies, as ``from_pretrained`` does.

    Parameters, and the tensors of ``loaded``, keep their values.
    """
    for tensor in (*model.parameters(), *loaded):
        # Mark what has values: initialize_weights passes it over.
        tensor._is_hf_initialized = True
    model.initialize_weights()
