"""Read what a model's folder holds, without torch: its files, architecture, dtype and size."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.schema import ModelConfig
from agentrl.documents.routing import ExpertShape
from agentrl.errors import ConfigError, ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ARCHITECTURE_KEYS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "intermediate_size", "head_dim", "tie_word_embeddings", "num_experts",
)  # fmt: skip
ADAPTER_CONFIG = "adapter_config.json"
"""The file by which peft's folder of an adapter is recognized."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_WHOLE_WEIGHTS = ("model.safetensors", ADAPTER_WEIGHTS, "pytorch_model.bin")
PEFT_PREFIX = "base_model.model."
"""What peft's files put before the name of each module of the model."""
_IN_FILES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPE_KEYS = ("dtype", "torch_dtype")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``. Raises ModelError if it cannot be read."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} is not a model folder: its config.json cannot be read: {error}",
            hint="give a folder that save_pretrained wrote",
        ) from error
    return config


def is_adapter(folder: Path) -> bool:
    """Return whether ``folder`` holds an adapter instead of a model's weights."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of peft's ``adapter_config.json``: r, lora_alpha and target_modules are in it.

    Raises ModelError if it cannot be read, or describes no LoRA.
    """
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if config["r"] < 1 or config["lora_alpha"] < 0 or not set(config["target_modules"]):
            raise ValueError("it describes no LoRA")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder} holds no adapter that can be read: {ADAPTER_CONFIG}: {error}",
            hint="give a checkpoint of `agentrl train`",
        ) from error
    return config


def stored_dtype(folder: Path) -> str:
    """Return the dtype of the model in ``folder``: float32, bfloat16 or float16.

    It is the one that config.json names; if it names none of these, the one of most weights in safetensors
    files; float32 without such files. Raises ModelError if a file cannot be read.
    """
    config = read_config(folder)
    for part in (config, config.get("text_config") or {}):
        for key in _DTYPE_KEYS:
            named = str(part.get(key)).removeprefix("torch.")
            if named in _IN_FILES.values():
                return named
    counts: Counter[str] = Counter()
    for file in tensor_files(folder):
        for entry in read_header(file).values():
            counts[entry["dtype"]] += math.prod(entry["shape"])
    found = [_IN_FILES[kind] for kind, _ in counts.most_common() if kind in _IN_FILES]
    return found[0] if found else "float32"


def replayed_experts(model: ModelConfig, folder: str) -> ExpertShape | None:
    """Return the shape of the experts in ``folder`` if their routing is replayed; None for a dense model.

    Raises ConfigError if ``--router_replay on`` names a model without experts, or one that cannot be read.
    """
    if model.router_replay == "off":
        return None
    try:
        shape = expert_shape(read_config(Path(folder)))
    except ModelError:
        shape = None
    if shape is None and model.router_replay == "on":
        raise ConfigError(
            f"--router_replay on: {folder} names no experts in a config.json", hint="leave it at auto"
        )
    return shape


def expert_shape(config: Mapping[str, Any]) -> ExpertShape | None:
    """Return the shape of a mixture's experts by its configuration; None for a dense model."""
    text = config.get("text_config") or config
    counts = (text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((count for count in counts if isinstance(count, int) and count > 1), None)
    layers, top_k = text.get("num_hidden_layers"), text.get("num_experts_per_tok")
    if experts is None or not isinstance(layers, int) or not isinstance(top_k, int):
        return None
    return ExpertShape(layers=layers, top_k=top_k, experts=experts)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that loading ``folder`` reads, by name.

    These are the one file of the whole weights, else those that the index lists, as transformers chooses
    them: Mistral's ``consolidated.safetensors`` beside them is a second copy. Without either they are all
    files of weights. Raises ModelError for an index that cannot be read.
    """
    for name in _WHOLE_WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return sorted(folder / file for file in listed)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(
                    f"{index} cannot be read: {error}", hint="download the model again"
                ) from error
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf"))


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files among ``weight_files``."""
    return [path for path in weight_files(folder) if path.suffix == ".safetensors"]


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the ``weight_files``. Raises OSError if one cannot be read, and ModelError."""
    return sum(path.stat().st_size for path in weight_files(folder))


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return {name: {dtype, shape, …}} of the tensors in a safetensors file. ModelError for another file."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
    except (OSError, ValueError, AttributeError, struct.error, OverflowError, MemoryError) as error:
        raise ModelError(
            f"{file} cannot be read as safetensors: {error}", hint="download the model again"
        ) from error
    return header


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


def require_folder(config: ModelConfig) -> None:
    """Raise ModelError as ``base_folder`` does, if a folder is given. Call it before a run is begun."""
    if config.model_name_or_path is not None:
        base_folder(config)


def architecture(folder: Path) -> dict[str, Any]:
    """Return the keys of config.json that decide whether weights fit: type, sizes, tied embeddings."""
    content = read_config(folder)
    content |= content.get("text_config") or {}
    return {key: content[key] for key in _ARCHITECTURE_KEYS if content.get(key) is not None}
