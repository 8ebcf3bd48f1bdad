"""Read the context length of a model from its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


def model_context_length(folder: str | Path) -> int | None:
    """Return the largest number of tokens of a prompt and its continuation; None if it is not configured."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    length = _length_of(config)
    return length if length is not None or not isinstance(text, dict) else _length_of(text)


def _length_of(config: Mapping[str, Any]) -> int | None:
    found = next((config[name] for name in _NAMES if type(config.get(name)) is int), None)
    return None if found is None else int(found * _extension(config))


def _extension(config: Mapping[str, Any]) -> float:
    """Return the factor by which rotary scaling extends the configured length.

    A scaling that names its original length is already counted in the configured one, as in Llama 3.1.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or "original_max_position_embeddings" in scaling:
        return 1.0
    if scaling.get("rope_type") == "llama3":
        return 1.0
    factor = scaling.get("factor", 1.0)
    return float(factor) if isinstance(factor, (int, float)) else 1.0
