"""One task's JSON: parsed, and checked against what a MongoDB document can hold."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_LINE_BYTES = 16 * 2**20
"""Longest JSON text of one task."""

MAX_DOCUMENT_BYTES = 15 * 2**20
"""Largest task as a document: MongoDB allows 16 MiB, slots and states included."""

MAX_DEPTH = 90
"""Deepest nesting of lists and objects: MongoDB allows 100 levels in a document."""

_INT64 = 2**63
_MOST_DIGITS = 300
_ELEMENT_BYTES = 16
"""Bytes of a number or a list's key in a document, rounded up."""

_ID = ("id", "task_id")


class BadTaskError(ValueError):
    """One task of the file cannot be loaded; the message is the reason."""


class _Unstorable:
    """Stands for a JSON number that no document can hold."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _NotStorableError(Exception):
    """A value that cannot be stored, with the path to it, innermost key first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []


def _integer(text: str) -> int | _Unstorable:
    if len(text) <= _MOST_DIGITS:
        return int(text)
    return _Unstorable(f"an integer of {len(text.lstrip('-')):,} digits, and the limit is 64 bits")


def _constant(name: str) -> _Unstorable:
    return _Unstorable(f"not JSON: {name} is not a JSON number")


DECODER = json.JSONDecoder(parse_int=_integer, parse_constant=_constant)


def parse(raw: bytes) -> Any:
    """Return the value of one line of JSON. Raises BadTaskError."""
    try:
        return DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadTaskError(f"not UTF-8: byte 0x{raw[error.start]:02x} (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise BadTaskError(f"not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise BadTaskError(f"nested more than {MAX_DEPTH} levels deep, the limit") from error


def check_storable(item: dict[str, Any]) -> None:
    """Raise BadTaskError, which names the field, unless a document can hold ``item``.

    The id may be any integer: it is stored as text.
    """
    fields = {key: value for key, value in item.items() if not (key in _ID and isinstance(value, int))}
    try:
        size = _size(fields, 1)
    except _NotStorableError as error:
        where = ".".join(reversed(error.path))
        raise BadTaskError(f"{where}: {error.reason}" if where else error.reason) from error
    if size > MAX_DOCUMENT_BYTES:
        raise BadTaskError(
            f"the task takes about {size:,} bytes as a document, and the limit is {MAX_DOCUMENT_BYTES:,}"
        )


def _size(value: Any, depth: int) -> int:
    """Return about the bytes that ``value`` takes in a document. Raises _NotStorableError."""
    if isinstance(value, str):
        return _text_size(value) + _ELEMENT_BYTES
    if isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            raise _NotStorableError(f"nested more than {MAX_DEPTH} levels deep, the limit")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return _ELEMENT_BYTES + sum(_item_size(key, item, depth) for key, item in items)
    _check_number(value)
    return _ELEMENT_BYTES


def _item_size(key: str | int, value: Any, depth: int) -> int:
    try:
        if isinstance(key, int):
            return _size(value, depth + 1)
        if "\0" in key:
            raise _NotStorableError("a NUL character in a key")
        return _text_size(key) + _size(value, depth + 1)
    except _NotStorableError as error:
        if len(error.path) < MAX_DEPTH:
            error.path.append(_shown(str(key)))
        raise


def _check_number(value: Any) -> None:
    if isinstance(value, _Unstorable):
        raise _NotStorableError(value.reason)
    if isinstance(value, float) and not math.isfinite(value):
        raise _NotStorableError("a number beyond the range of a 64-bit float")
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise _NotStorableError(f"the integer {_shown(str(value))}, and the limit is 64 bits")


def _text_size(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        char = text[error.start]
        what = "a byte that is not UTF-8, or " if "\udc80" <= char <= "\udcff" else ""
        raise _NotStorableError(f"{what}the lone surrogate {char!r}") from error


def _shown(text: str, limit: int = 40) -> str:
    """Return ``text`` as printable ASCII, cut to ``limit`` characters."""
    plain = text.encode("unicode_escape").decode("ascii")
    return plain if len(plain) <= limit else f"{plain[:limit]}…"
