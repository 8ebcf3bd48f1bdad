"""Values out of a model's JSON, made fit for tokenizers, JSON-RPC and BSON."""

from __future__ import annotations

import json
from typing import Any

_INT64 = 2**63
_DEEPEST = 40
"""Levels of nesting kept; BSON allows 100 in all."""


def clean(value: Any) -> Any:
    """``value`` with every lone surrogate in its texts replaced: no encoder takes one."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    return value


def storable(value: Any, depth: int = 0) -> Any:
    """``clean`` with what BSON cannot hold written as text: huge integers, deep nesting, NUL in a key."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, (list, tuple, dict)) and depth >= _DEEPEST:
        return clean(json.dumps(value, default=str))
    if isinstance(value, (list, tuple)):
        return [storable(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {
            clean(str(key)).replace("\0", "\ufffd"): storable(item, depth + 1) for key, item in value.items()
        }
    return clean(value)
