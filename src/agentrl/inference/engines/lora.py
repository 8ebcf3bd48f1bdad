"""Decide whether an engine loads the LoRA adapters of a run, and return the flags that let it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.config.training import AdapterConfig
from agentrl.weights.folder import read_config, read_header, tensor_files

_SGLANG_LAYERS = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj",
     "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
)  # fmt: skip
"""The linear layers that SGLang 0.5.23 adapts (``--lora-target-modules``)."""
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``--max-lora-rank``."""


def why_merged(engine: str, folder: str, adapter: AdapterConfig, *, has_gpu: bool) -> str | None:
    """Return why ``engine`` gets adapters merged into the weights of ``folder``; None if it loads them."""
    if adapter.lora_rank == 0 and engine != "local":
        return f"{engine} was started without --lora_rank, and the run had no trainer yet"
    config = read_config(Path(folder))
    if "vision_config" in config:
        return "the model reads images"
    if engine == "local":
        return None
    if any("expert" in key and value for key, value in config.items()):
        return f"{engine} adapts the experts of a mixture in other ways than the trainer"
    if engine == "vllm":
        if not has_gpu:
            return "vLLM's adapters need a GPU"
        return None if adapter.lora_rank <= _VLLM_RANKS[-1] else f"vLLM's ranks end at {_VLLM_RANKS[-1]}"
    unknown = sorted(_target_layers(folder, adapter) - _SGLANG_LAYERS)
    return f"SGLang adapts no layers named {', '.join(unknown)}" if unknown else None


def lora_arguments(engine: str, folder: str, adapter: AdapterConfig, *, has_gpu: bool) -> list[str]:
    """Return the arguments of a server of ``engine`` that loads the run's adapters by itself."""
    if engine == "local" or why_merged(engine, folder, adapter, has_gpu=has_gpu) is not None:
        return []
    if engine == "vllm":
        rank = next(rank for rank in _VLLM_RANKS if rank >= adapter.lora_rank)
        return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "4", "--max-cpu-loras", "8"]
    layers = sorted(_target_layers(folder, adapter))
    return [
        *("--enable-lora", "--max-lora-rank", str(adapter.lora_rank), "--lora-target-modules", *layers),
        *(() if has_gpu else ("--lora-backend", "torch_native")),
    ]


def _target_layers(folder: str, adapter: AdapterConfig) -> set[str]:
    """Return the names of the layers that get an adapter; for all-linear those of the model's matrices."""
    targets = adapter.target_modules
    if isinstance(targets, list):
        return {name.rpartition(".")[2] for name in targets}
    headers: list[dict[str, Any]] = [read_header(file) for file in tensor_files(Path(folder))]
    names = (name for header in headers for name, entry in header.items() if len(entry["shape"]) == 2)
    return {name.split(".")[-2] for name in names if ".layers." in name and name.endswith(".weight")}
