"""Check that a model computes each sequence of a packed forest as if it were alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from agentrl.errors import ModelError

_FULL = frozenset({"full_attention", "attention"})
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_NOISE = ("dropout", "pdrop", "router_jitter_noise", "layerdrop")


@dataclass(frozen=True, slots=True)
class MaskLimits:
    """Reasons why no attention mask makes a model exact on a forest; a path run alone is always exact."""

    state: str | None
    """Layers that carry a state along the row (linear attention, convolutions, recurrences), and so read
    the tokens packed before a sequence."""
    window: int | None
    """Tokens of the smallest attention window: a layer measures it along the row, not by depth in a tree."""

    @classmethod
    def of(cls, model: Any) -> MaskLimits:
        """Read them from the model's configuration."""
        config = model.config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or ())
        stateful = sorted(layers - _FULL - set(_WINDOWED))
        state = None
        if stateful or getattr(model, "_is_stateful", False):
            state = ", ".join(stateful) or "a recurrent state"
        return cls(state, _window(config))

    def reason(self, depth: int) -> str | None:
        """Return why no mask is exact on paths of up to ``depth`` tokens; None if one is."""
        if self.state is not None:
            return f"{self.state}, which carries over from one sequence to the next"
        if self.window is not None and depth > self.window:
            return f"layers that see only {self.window} tokens back, less than a sequence"
        return None


def check_compatibility(model: Any, *, trains: bool = True) -> None:
    """Raise ModelError for a model whose result depends on what its sequences are packed with.

    The causes are an auxiliary router loss over a micro-batch, experts with a token capacity, attention
    scores that are capped inside the kernel, and, if the model ``trains``, dropout and other noise.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    if trains:
        _check_noise(name, model, config)
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"{name} adds an auxiliary loss of its router, a mean over the tokens of a micro-batch: it would"
            " depend on how trajectories are packed and merged",
            hint="set output_router_logits to false in the model's config.json",
        )
    if getattr(config, "expert_capacity", None):
        raise ModelError(
            f"{name} drops tokens beyond {config.expert_capacity} per expert: neighbors change its result",
            hint="use a mixture-of-experts model whose experts take every token",
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError(
            f"{name} caps its attention scores at {config.attn_logit_softcapping}, which no executor does",
            hint="use a model without attn_logit_softcapping",
        )


def set_attention(model: Any, implementation: str) -> None:
    """Make every attention layer use ``implementation``; ModelError if the model does not support it."""
    text = model.config.get_text_config()
    if text._attn_implementation == implementation:
        return
    hint = "use a model that transformers runs through its attention interface (Llama, Qwen, Mistral, …)"
    name = type(model).__name__
    try:
        if text is model.config:
            model.set_attn_implementation(implementation)
        else:  # the vision tower keeps its own
            model.set_attn_implementation({"text_config": implementation})
    except ValueError as error:
        raise ModelError(f"{name} has no {implementation!r} attention: {error}", hint=hint) from error
    if text._attn_implementation != implementation:
        raise ModelError(f"{name} does not let its attention be set to {implementation!r}", hint=hint)


def _window(config: Any) -> int | None:
    """Return the smallest window of the attention layers, in tokens; None if all see every token."""
    layers = getattr(config, "layer_types", None)
    if layers is None:
        used = getattr(config, "use_sliding_window", True)
        names = ["sliding_window"] if used else []
    else:
        names = [_WINDOWED[layer] for layer in set(layers) if layer in _WINDOWED]
    windows = [getattr(config, attribute, None) for attribute in names]
    return min((int(window) for window in windows if window is not None), default=None)


def _check_noise(name: str, model: nn.Module, config: Any) -> None:
    rates = {f"dropout {module.p}": module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    for key, value in vars(config).items():
        if isinstance(value, float) and key.endswith(_NOISE) and not key.startswith("classifier"):
            rates[f"{key} {value}"] = value
    worst = max(rates, key=lambda key: rates[key], default=None)
    if worst is not None and rates[worst] > 0:
        raise ModelError(
            f"{name} trains with {worst}: its loss would depend on how trajectories are packed, and its"
            " ratios to the behavior policy would be noise",
            hint="set it to 0: in the model's config.json, or in the arguments of an adapter",
        )
