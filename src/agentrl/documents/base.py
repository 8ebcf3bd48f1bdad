"""Convert frozen dataclasses to MongoDB documents and back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Self, Union, cast, get_args, get_origin, get_type_hints

from agentrl.errors import StoreError


@dataclasses.dataclass(slots=True)
class _Clock:
    """The clock of this process. Another host's clock may differ by minutes; all follow the database's."""

    shown: datetime | None = None
    """What the database's clock showed at ``uptime``; None before a connection."""
    uptime: float = 0.0

    def now(self) -> datetime:
        if self.shown is None:
            return datetime.fromtimestamp(time.time(), UTC)
        return self.shown + timedelta(seconds=_uptime() - self.uptime)


_clock = _Clock()


def now() -> datetime:
    """Return the current time as MongoDB stores it: UTC, whole milliseconds.

    It is the database's time once ``follow_clock`` was called, and before that this host's.
    """
    moment = _clock.now()
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def follow_clock(shown: datetime) -> None:
    """Let ``now`` go on from ``shown``, the time of the database's clock, whatever this host's clock says."""
    _clock.shown, _clock.uptime = _with_time_zone(shown), _uptime()


def _uptime() -> float:
    """Return seconds that no change of the host's clock moves, and that count on while it sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Document:
    """Mix-in for frozen dataclasses. A field ``id`` of a ``Root`` is stored as ``_id``."""

    def to_document(self) -> dict[str, Any]:
        """Return the fields in declared order, with nested documents and enums converted by ``plain``."""
        return {
            stored: plain(getattr(self, name)) for name, stored, _ in _fields(cast("Hashable", type(self)))
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the object of a document. Ignores unknown keys; raises StoreError for a missing field."""
        values = {}
        for name, stored, decode in _fields(cast("Hashable", cls)):
            if stored in document:
                value = document[stored]
                values[name] = value if decode is None or value is None else decode(value)
        try:
            return cls(**values)
        except TypeError as error:
            raise StoreError(f"a {cls.__name__} document is incomplete: {error}") from error


class Root(Document):
    """A document with its own collection; subclasses declare ``id``, which is stored as ``_id``."""


Decode = Callable[[Any], Any]
"""Converts a stored value other than None to the value of a field."""


@cache
def _fields(cls: Any) -> tuple[tuple[str, str, Decode | None], ...]:
    """Return (name, stored name, decoder or None) of each field."""
    hints = get_type_hints(cls)
    return tuple(
        (
            field.name,
            "_id" if field.name == "id" and issubclass(cls, Root) else field.name,
            _decoder(hints[field.name]),
        )
        for field in dataclasses.fields(cls)
    )


def plain(value: Any) -> Any:
    """Return the value with documents and enums converted for BSON, also in lists and mappings."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Document):
        return value.to_document()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (dict, Mapping)):
        return {key: plain(item) for key, item in value.items()}
    return value


_PLAIN = frozenset({str, int, float, bool, bytes, type(None), datetime})


def _decoder(hint: Any) -> Decode | None:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        return _decoder(inner[0]) if len(inner) == 1 else None
    if origin in (tuple, list):
        return _sequence_decoder(origin, _decoder(get_args(hint)[0]))
    if isinstance(hint, type):
        if issubclass(hint, Document):
            return hint.from_document
        if issubclass(hint, Enum):
            return hint
        if hint is datetime:
            return _with_time_zone
    return None


def _sequence_decoder(make: Callable[[Iterable[Any]], Any], decode: Decode | None) -> Decode:
    if decode is None:
        return make
    return lambda items: make([None if item is None else decode(item) for item in items])


def _with_time_zone(value: Any) -> Any:
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value
