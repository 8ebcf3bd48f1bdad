"""Says which models would compute something else on a packed forest than on each sequence alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from agentrl.data.forest import TokenForest
from agentrl.errors import ModelError

_FULL = frozenset({"full_attention", "attention"})
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_NOISE = ("dropout", "pdrop", "router_jitter_noise", "layerdrop")


def check_limits(model: Any) -> None:
    """Raise ModelError where the model's result would depend on what its sequences are packed with.

    Such are dropout and other noise in training, an auxiliary loss over the micro-batch's router decisions,
    experts that drop tokens beyond a capacity, and scores capped inside attention kernels.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    if model.training:
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


def unmaskable(model: Any, forest: TokenForest) -> str | None:
    """Why no attention mask makes the model exact on ``forest``; None where one does.

    Layers that carry a state along the row (linear attention, convolutions, recurrences) read whatever was
    packed before; windows are measured along the row, and not in depth. Both are exact on a path alone.
    """
    return unmaskable_at(model, forest.depth)


def unmaskable_at(model: Any, depth: int) -> str | None:
    """``unmaskable`` for all forests of up to ``depth`` tokens on a path."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    stateful = sorted(layers - _FULL - set(_WINDOWED))
    if stateful or getattr(model, "_is_stateful", False):
        return f"{', '.join(stateful) or 'a recurrent state'}, which goes on from one sequence into the next"
    window = attention_window(config)
    if window is not None and depth > window:
        return f"layers that see {window} tokens back, fewer than a sequence has"
    return None


def attention_window(config: Any) -> int | None:
    """The smallest window of the model's attention layers in tokens; None where all see everything."""
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
