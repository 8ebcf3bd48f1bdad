"""Load the model and the tokenizer of a Hugging Face folder; errors name what is missing from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentrl.config.schema import AdapterConfig, ModelConfig
from agentrl.errors import ModelError
from agentrl.weights.adapter_folder import is_adapter

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentrl.model.lora import Adapter
    from agentrl.model.pixels import PixelReader
    from agentrl.weights.model_folder import SavableModel

VISION_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
"""``model_type`` of the models whose images can be trained."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ARCHITECTURE_KEYS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "intermediate_size", "head_dim", "tie_word_embeddings", "num_experts",
)  # fmt: skip


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

    @property
    def kept(self) -> SavableModel:
        """What a checkpoint stores: the adapter, or the whole model if there is none."""
        return self.adapter or self.model

    @property
    def published(self) -> SavableModel:
        """What engines load: whole weights, with the adapter merged in."""
        return self.adapter.merged if self.adapter else self.model


def base_folder(config: ModelConfig) -> Path:
    """Return the folder of ``--model_name_or_path``; ModelError if it is missing or lacks a model's files."""
    if config.model_name_or_path is None:
        raise ModelError("no model is given", hint="give --model_name_or_path FOLDER")
    folder = Path(config.model_name_or_path)
    if not folder.is_dir():
        raise ModelError(
            f"--model_name_or_path {folder} is not a folder",
            hint="give a local Hugging Face folder; `hf download NAME --local-dir FOLDER` fetches one",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", hint="give a folder that save_pretrained wrote")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})",
            hint="copy the tokenizer's files into the folder",
        )
    if is_adapter(folder):
        raise ModelError(
            f"{folder} holds an adapter, not a model",
            hint="give the folder of published weights, …/weights/v…",
        )
    return folder


def load_policy(
    config: ModelConfig, weights: Path | None = None, adapter: AdapterConfig | None = None
) -> Policy:
    """Load the policy for training, with weights from a checkpoint's folder ``weights`` or the base folder.

    If ``adapter`` has a rank above 0, ``weights`` are those of the adapter. Dropout is set to 0, so that the
    trainer's logprobs match the engine's. Raises ModelError for a folder without tokenizer, chat template or
    known architecture.
    """
    base = base_folder(config)
    tokenizer, template = load_tokenizer(config, base)
    is_adapted = adapter is not None and adapter.lora_rank > 0
    if weights is not None and not is_adapted and is_adapter(weights):
        raise ModelError(f"{weights} holds an adapter", hint="give the --lora_rank that it was trained with")
    model = load_model(base if is_adapted else weights or base, config)
    embedded = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    if len(tokenizer) > embedded:
        raise ModelError(
            f"the tokenizer of {base} has {len(tokenizer)} ids, and the model embeds {embedded}",
            hint="resize the model's embeddings, or use the tokenizer that belongs to it",
        )
    disable_dropout(model)
    if reads_images(model.config):
        from agentrl.model.pixels import PixelReader

        if is_adapted:
            raise ModelError(
                "--lora_rank with a vision model has not been tested",
                hint="leave it out, or freeze parts with --freeze",
            )
        return Policy(model, tokenizer, base, template, pixels=PixelReader(base))
    if adapter is None or not is_adapted:
        return Policy(model, tokenizer, base, template)
    from agentrl.model.lora import add_adapter

    return Policy(model, tokenizer, base, template, add_adapter(model, adapter, base, weights))


def reads_images(config: object) -> bool:
    """Return whether a model with this configuration is one of those whose images can be trained."""
    return getattr(config, "model_type", None) in VISION_TYPES


def load_tokenizer(config: ModelConfig, folder: Path) -> tuple[PreTrainedTokenizerBase, str | None]:
    """Return the tokenizer with its chat template, and the content of ``--chat_template`` or None."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the tokenizer of {folder} cannot be loaded: {_first_line(error)}",
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


def architecture(folder: Path) -> dict[str, Any]:
    """Return the keys of config.json that decide whether weights fit: type, sizes, tied embeddings."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {error}", hint="restore the file") from error
    content |= content.get("text_config") or {}
    return {key: content[key] for key in _ARCHITECTURE_KEYS if content.get(key) is not None}


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout probability of the modules to 0."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def resolve_dtype(name: str) -> torch.dtype:
    """Return the dtype of ``--dtype``; ``auto`` is bfloat16 on an accelerator and float32 on a CPU."""
    import torch

    if name == "auto":
        return torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    found: torch.dtype = getattr(torch, name)
    return found


def load_model(folder: Path, config: ModelConfig) -> PreTrainedModel:
    """Load the model in ``folder`` with the dtype of ``config``; ModelError if it cannot be loaded."""
    from transformers.utils import logging as transformers_logging

    disable_progress_bar: Callable[[], None] = transformers_logging.disable_progress_bar
    disable_progress_bar()
    try:
        model = _model_class(folder).from_pretrained(
            str(folder),
            dtype=resolve_dtype(config.dtype),
            attn_implementation="sdpa",
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"the model in {folder} cannot be loaded: {_first_line(error)}",
            hint="check its config.json and weights; code of its own needs --trust_remote_code true",
        ) from error
    return cast("PreTrainedModel", model)


def _model_class(folder: Path) -> Any:
    """Return the class that loads a language model, or one with a vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_vision = "vision_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return AutoModelForImageTextToText if is_vision else AutoModelForCausalLM


def _own_template(config: ModelConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"--chat_template {config.chat_template} cannot be read: {error.strerror}",
            hint="give an existing file",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
