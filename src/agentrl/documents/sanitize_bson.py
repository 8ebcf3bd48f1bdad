"""Sanitize values from models and user code, so that tokenizers, JSON-RPC and BSON accept them."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeGuard

_INT64 = 2**63
_MAX_DEPTH = 40
"""Levels of nesting that are kept; BSON allows 100 in a whole document."""


def replace_surrogates(value: Any) -> Any:
    """Return ``value`` with every lone surrogate in its strings replaced: no encoder accepts one."""
    if isinstance(value, str):
        is_plain = type(value) is str and value.isascii()
        return value if is_plain else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, (list, tuple)):
        return [replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(str(key)): replace_surrogates(item) for key, item in value.items()}
    return value


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is a number that is finite as a float, which 10**311 is not."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def sanitize_bson(value: Any, depth: int = 0) -> Any:
    """Return ``value`` with everything that BSON cannot hold converted.

    Lone surrogates, and NUL in keys, are replaced. Integers beyond 64 bits, nesting beyond 40 levels and
    other objects become strings, sets become lists, and numbers of other libraries become Python's.
    """
    if value is None or isinstance(value, (bool, float, bytes, datetime)):
        return float(value) if isinstance(value, float) else value
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, (list, dict)) and depth < _MAX_DEPTH:
        return _sanitize_items(value, depth + 1)
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return whole if -_INT64 <= whole < _INT64 else str(whole)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) and depth >= _MAX_DEPTH:
        return _to_text(value)
    if isinstance(value, (set, frozenset)):
        return _sanitize_items(sorted(value, key=repr), depth + 1)
    if isinstance(value, (tuple, Mapping)):
        return _sanitize_items(value, depth + 1)
    return replace_surrogates(str(value))


def _sanitize_items(value: Mapping[Any, Any] | Sequence[Any], depth: int) -> Any:
    if isinstance(value, (dict, Mapping)):
        return {
            replace_surrogates(str(key)).replace("\0", "\ufffd"): sanitize_bson(item, depth)
            for key, item in value.items()
        }
    return [sanitize_bson(item, depth) for item in value]


def _to_text(value: Any) -> str:
    try:
        return str(replace_surrogates(json.dumps(value, default=str)))
    except (RecursionError, ValueError, TypeError):
        return f"[{type(value).__name__}, nested too deeply]"
