"""Values from models and extensions, made fit for tokenizers, JSON-RPC and BSON."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from datetime import datetime
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
    """``clean`` with what BSON cannot hold in a form that it can.

    Text: huge integers, deep nesting, objects. A set is a list, a number of another library one of Python's.
    NUL in a key is replaced.
    """
    if value is None or isinstance(value, (bool, bytes, datetime)):
        return value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return whole if -_INT64 <= whole < _INT64 else str(whole)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) and depth >= _DEEPEST:
        return _nested_text(value)
    if isinstance(value, (list, tuple)):
        return [storable(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return [storable(item, depth + 1) for item in sorted(value, key=repr)]
    if isinstance(value, Mapping):
        return {
            clean(str(key)).replace("\0", "\ufffd"): storable(item, depth + 1) for key, item in value.items()
        }
    return clean(str(value))


def _nested_text(value: Any) -> str:
    try:
        return str(clean(json.dumps(value, default=str)))
    except (RecursionError, ValueError, TypeError):
        return f"[{type(value).__name__}, nested too deeply]"
