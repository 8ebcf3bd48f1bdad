"""Random models of a few thousand parameters, one per architecture whose exactness is tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 61

_NUMBERS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "attn_implementation": "sdpa", "initializer_range": 0.2,
}  # fmt: skip


def _llama(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**(_NUMBERS | more)))


def _qwen3(**more: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**(_NUMBERS | more)))


def _qwen3_moe() -> PreTrainedModel:
    numbers = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=True, **(_NUMBERS | numbers)))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: _qwen3(num_key_value_heads=4, tie_word_embeddings=False),
    "qwen3 gqa, tied": lambda: _qwen3(tie_word_embeddings=True),
    "llama": lambda: _llama(num_key_value_heads=4, tie_word_embeddings=False),
    "llama gqa, untied": lambda: _llama(num_key_value_heads=1, tie_word_embeddings=False),
    "llama gqa, tied": lambda: _llama(tie_word_embeddings=True),
    "qwen3-moe": _qwen3_moe,
}
"""Two layers and four heads each; ``gqa`` has fewer key-value heads, ``tied`` shares head and embedding."""


def tiny_model(name: str, *, seed: int = 0, device: str = "cpu") -> PreTrainedModel:
    """Return the model called ``name``, float32, in training mode; the same weights for the same seed."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    model.to(torch.device(device))  # type: ignore[arg-type]
    model.train()
    return model
