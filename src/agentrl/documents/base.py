"""How a frozen dataclass becomes a MongoDB document and comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Self, Union, cast, get_args, get_origin, get_type_hints

from agentrl.errors import StoreError


def now() -> datetime:
    """The time as MongoDB keeps it: UTC, whole milliseconds."""
    moment = datetime.now(UTC)
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


class Document:
    """Mix-in for frozen dataclasses. A field ``id`` of a ``Root`` is stored as ``_id``."""

    def to_document(self) -> dict[str, Any]:
        """The fields in their declared order, nested documents and enums made plain."""
        return {
            stored: plain(getattr(self, name)) for name, stored, _ in _fields(cast("Hashable", type(self)))
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_document``; unknown keys are ignored, a missing required one is a StoreError."""
        values = {}
        for name, stored, revive in _fields(cast("Hashable", cls)):
            if stored in document:
                value = document[stored]
                values[name] = value if revive is None or value is None else revive(value)
        try:
            return cls(**values)
        except TypeError as error:
            raise StoreError(f"a {cls.__name__} document is incomplete: {error}") from error


class Root(Document):
    """A document with a collection of its own; subclasses declare ``id``, stored as ``_id``."""


Revive = Callable[[Any], Any]
"""Makes a stored value, which is not None, the value of a field."""


@cache
def _fields(cls: Any) -> tuple[tuple[str, str, Revive | None], ...]:
    """Of each field: its name, the name under which it is stored, and what revives it (None: nothing)."""
    hints = get_type_hints(cls)
    return tuple(
        (
            field.name,
            "_id" if field.name == "id" and issubclass(cls, Root) else field.name,
            _reviver(hints[field.name]),
        )
        for field in dataclasses.fields(cls)
    )


def plain(value: Any) -> Any:
    """A value as BSON takes it: documents and enums made plain, inside lists and mappings too."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Document):
        return value.to_document()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


_PLAIN = frozenset({str, int, float, bool, bytes, type(None), datetime})


def _reviver(hint: Any) -> Revive | None:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        return _reviver(inner[0]) if len(inner) == 1 else None
    if origin in (tuple, list):
        return _sequence_reviver(origin, _reviver(get_args(hint)[0]))
    if isinstance(hint, type):
        if issubclass(hint, Document):
            return hint.from_document
        if issubclass(hint, Enum):
            return hint
        if hint is datetime:
            return _with_zone
    return None


def _sequence_reviver(make: Callable[[Iterable[Any]], Any], revive: Revive | None) -> Revive:
    if revive is None:
        return make
    return lambda items: make([None if item is None else revive(item) for item in items])


def _with_zone(value: Any) -> Any:
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value
