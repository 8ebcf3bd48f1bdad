"""Refuses models whose result on a packed forest would differ from their result on each sequence alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from agentrl.batching.forest import TokenForest
from agentrl.errors import ModelError

_FULL = frozenset({"full_attention", "attention"})
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def check_forest_limits(model: Any, forest: TokenForest) -> None:
    """Raise ModelError where the model cannot be run exactly on ``forest``."""
    name = type(model).__name__
    config = model.config.get_text_config()
    _check_layers(name, model, config)
    window = attention_window(config)
    if window is not None and forest.depth > window:
        raise ModelError(
            f"{name} has layers that see {window} tokens back, and a trajectory has {forest.depth} tokens",
            cure="use a model with full attention, or lower --max_prompt_tokens and --max_new_tokens",
        )
    if model.training:
        _check_dropout(name, model, config)


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


def _check_layers(name: str, model: Any, config: Any) -> None:
    layers = set(getattr(config, "layer_types", None) or ())
    unmaskable = sorted(layers - _FULL - set(_WINDOWED))
    if unmaskable or getattr(model, "_is_stateful", False):
        kind = ", ".join(unmaskable) or "a recurrent state"
        raise ModelError(
            f"{name} has {kind}, which leaks from one packed trajectory into the next",
            cure="use a model whose layers are all softmax attention",
        )


def _check_dropout(name: str, model: nn.Module, config: Any) -> None:
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    rates.append(float(getattr(config, "attention_dropout", 0.0) or 0.0))
    if max(rates) > 0:
        raise ModelError(
            f"{name} trains with dropout {max(rates)}: its loss would depend on how trajectories are packed,"
            " and its ratios to the behavior policy would be noise",
            cure="set every dropout of the model's config.json to 0",
        )
