"""Read Python literals as models write them: also with the names ``true``, ``false`` and ``null`` of JSON."""

from __future__ import annotations

import ast
import math
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}
_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


def read_literal(text: str) -> Any:
    """Return the value of a Python literal. Raises ValueError for text that JSON cannot express."""
    try:
        return literal_of(ast.parse(text.strip(), mode="eval").body)
    except _PARSE_ERRORS as error:
        raise ValueError(f"not a literal: {error}") from error


def literal_of(node: ast.expr) -> Any:
    """Return the value of a parsed literal. Raises ValueError for an expression and for bytes or sets."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise ValueError("a number is not finite")
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [literal_of(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_key_of(key) for key in node.keys]
        return dict(zip(keys, map(literal_of, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = literal_of(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise ValueError(f"{ast.unparse(node)[:120]} is not a literal")


def _key_of(node: ast.expr | None) -> str:
    if node is None:
        raise ValueError("** is not a literal")
    key = literal_of(node)
    if isinstance(key, (list, dict)):
        raise ValueError(f"a key is {type(key).__name__}")
    return key if isinstance(key, str) else str(key)
