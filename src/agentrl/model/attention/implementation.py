"""Sets a model's attention implementation, or says why it cannot be set."""

from __future__ import annotations

from typing import Any

from agentrl.errors import ModelError


def use_attention(model: Any, implementation: str) -> None:
    """Make every attention layer of ``model`` use ``implementation``; ModelError where the model cannot."""
    if model.config._attn_implementation == implementation:
        return
    hint = "use a model that transformers runs through its attention interface (Llama, Qwen, Mistral, …)"
    name = type(model).__name__
    try:
        model.set_attn_implementation(implementation)
    except ValueError as error:
        raise ModelError(f"{name} has no {implementation!r} attention: {error}", hint=hint) from error
    if model.config._attn_implementation != implementation:
        raise ModelError(f"{name} does not let its attention be set to {implementation!r}", hint=hint)
