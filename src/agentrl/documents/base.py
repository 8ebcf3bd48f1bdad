"""How a frozen dataclass becomes a MongoDB document and comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
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
            _stored_name(type(self), field.name): plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_document``; unknown keys are ignored, a missing required one is a StoreError."""
        values = {}
        for name, hint in _hints(cast("Hashable", cls)).items():
            stored = _stored_name(cls, name)
            if stored in document:
                values[name] = _revive(hint, document[stored])
        try:
            return cls(**values)
        except TypeError as error:
            raise StoreError(f"a {cls.__name__} document is incomplete: {error}") from error


class Root(Document):
    """A document with a collection of its own; subclasses declare ``id``, stored as ``_id``."""


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _stored_name(cls: type, name: str) -> str:
    return "_id" if name == "id" and issubclass(cls, Root) else name


def plain(value: Any) -> Any:
    """A value as BSON takes it: documents and enums made plain, inside lists and mappings too."""
    if isinstance(value, Document):
        return value.to_document()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def _revive(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        return _revive(inner[0], value) if len(inner) == 1 else value
    if origin in (tuple, list):
        item_hint = get_args(hint)[0]
        return origin(_revive(item_hint, item) for item in value)
    if isinstance(hint, type):
        if issubclass(hint, Document):
            return hint.from_document(value)
        if issubclass(hint, Enum):
            return hint(value)
        if hint is datetime and isinstance(value, datetime) and value.tzinfo is None:
            return value.replace(tzinfo=UTC)
    return value
