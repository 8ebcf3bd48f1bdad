"""Convert frozen dataclasses to MongoDB documents and back; make values from outside storable."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from types import UnionType
from typing import Any, Self, TypeGuard, TypeVar, Union, cast, get_args, get_origin, get_type_hints

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
    # Cut what MongoDB would cut: a document read back equals the one that was written.
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
        """Return the fields in declared order, with nested dataclasses and enums converted by ``plain``."""
        return _written(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the object of a document; ignores unknown keys.

        Raises StoreError for a missing field, and for one that cannot be decoded: an import may hold
        documents that the schema refuses.
        """
        return _read(cls, document)


class Root(Document):
    """A document with its own collection; subclasses declare ``id``, which is stored as ``_id``."""


D = TypeVar("D")


def _written(value: object) -> dict[str, Any]:
    """Return the fields of a dataclass as they are stored."""
    stored, get = _getter(cast("Hashable", type(value)))
    return _plain_items(zip(stored, get(value), strict=True))


@cache
def _getter(cls: Any) -> tuple[list[str], Callable[[Any], Iterable[Any]]]:
    """Return the stored names of the fields, and what returns their values."""
    names, stored = [name for name, _, _ in _fields(cls)], [stored for _, stored, _ in _fields(cls)]
    # Ask apart for a single field and none: of one name attrgetter returns the value, not a tuple.
    if len(names) < 2:
        return stored, lambda value: [getattr(value, name) for name in names]
    return stored, attrgetter(*names)


def _read(cls: type[D], document: Mapping[str, Any]) -> D:
    """Return the dataclass ``cls`` of its stored fields. Raises StoreError."""
    values = {}
    try:
        for name, stored, decode in _fields(cast("Hashable", cls)):
            if stored in document:
                value = document[stored]
                values[name] = value if decode is None or value is None else decode(value)
        return cls(**values)
    except (AttributeError, TypeError, ValueError) as error:
        raise StoreError(f"a {cls.__name__} document is damaged or incomplete: {error}") from error


def _is_plain(cls: type) -> bool:
    """Return whether every field of a dataclass is stored under its own name, as it is."""
    return all(name == stored and decode is None for name, stored, decode in _fields(cls))


def _read_plain(cls: type[D], document: Mapping[str, Any]) -> D:
    # Try first without a look at each field: training data have a span for each model call.
    try:
        return cls(**document)
    except (AttributeError, TypeError, ValueError):  # a field is missing, unknown or damaged
        return _read(cls, document)


Decode = Callable[[Any], Any]
"""Converts a stored value other than None to the value of a field."""


# Cache it: get_type_hints compiles and evaluates every annotation anew, and each document read asks for it.
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
    """Return the value with dataclasses and enums converted for BSON, also in lists and mappings."""
    # Compare the exact type: a StrEnum is a str to isinstance, and would not become its value.
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return _plain_items(value.items())
    if isinstance(value, Document):
        return value.to_document()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return _plain_items(value.items())
    if dataclasses.is_dataclass(value):  # of a package below the documents
        return _written(value)
    return value


def _plain_items(items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    # Ask before the call: most values are plain, and a call of Python costs more than they do.
    return {key: item if type(item) in _PLAIN else plain(item) for key, item in items}


_PLAIN = frozenset({str, int, float, bool, bytes, type(None), datetime})


def _decoder(hint: Any) -> Decode | None:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        return _decoder(inner[0]) if len(inner) == 1 else None
    if origin in (tuple, list):
        return _sequence_decoder(origin, _decoder(get_args(hint)[0]))
    if origin is dict:
        return _mapping
    if isinstance(hint, type):
        if dataclasses.is_dataclass(hint):
            return partial(_read_plain if _is_plain(hint) else _read, hint)
        if issubclass(hint, Enum):
            return hint
        if hint is datetime:
            return _with_time_zone
    return None


def _sequence_decoder(make: Callable[[Iterable[Any]], Any], decode: Decode | None) -> Decode:
    if decode is None:
        return make
    return lambda items: make([None if item is None else decode(item) for item in items])


def _mapping(value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"{str(value)[:80]!r} is not an object")
    return value


def _with_time_zone(value: Any) -> Any:
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


_KEPT = frozenset({float, bool, bytes, type(None)})
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


LARGEST_SCORE = 1e18
"""Largest size of a score or a reward: training squares what it makes of it in float32."""


def is_score(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number of at most ``LARGEST_SCORE``."""
    return is_finite(value) and abs(value) <= LARGEST_SCORE


def score_problem(value: Any) -> str:
    """Return what is wrong with a value that is not a score."""
    return f"is beyond ±{LARGEST_SCORE:g}" if is_finite(value) else "is not a finite number"


def sanitize_bson(value: Any, depth: int = 0) -> Any:
    """Return ``value`` with everything that BSON cannot hold converted.

    What is returned equals what is read again. Lone surrogates, and NUL in keys, are replaced, and the key
    ``$ref`` beside ``$id``. Integers beyond 64 bits, nesting beyond 40 levels and other objects become
    strings, sets become lists, and numbers of other libraries become Python's. Times are in UTC, with
    milliseconds.
    """
    # Look at the exact type first: nearly all values are of these, and to ask an abstract class is slow.
    kind = type(value)
    if kind is str:
        return value if value.isascii() else replace_surrogates(value)
    if kind in _KEPT or (kind is int and -_INT64 <= value < _INT64):
        return value
    if isinstance(value, datetime):
        try:
            moment = value.replace(tzinfo=value.tzinfo or UTC).astimezone(UTC)
        except OverflowError:  # in its own time zone it is in year 1 or 9999, in UTC in none
            return str(value)
        return moment.replace(microsecond=moment.microsecond // 1000 * 1000, fold=0)
    if value is None or isinstance(value, (bool, float, bytes)):
        # Convert a float too: numpy's float64 is a subclass, which orjson refuses.
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
        # Sort by repr: hashes order a set anew in each process, and its items may not compare.
        return _sanitize_items(sorted(value, key=repr), depth + 1)
    if isinstance(value, (tuple, Mapping)):
        return _sanitize_items(value, depth + 1)
    return replace_surrogates(str(value))


def _sanitize_items(value: Mapping[Any, Any] | Sequence[Any], depth: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [sanitize_bson(item, depth) for item in value]
    items = {
        replace_surrogates(str(key)).replace("\0", "\ufffd"): sanitize_bson(item, depth)
        for key, item in cast("Mapping[Any, Any]", value).items()
    }
    if "$ref" in items and "$id" in items:
        # Rename it: the driver would read a reference, a DBRef, where an object was written.
        return {"\uff04ref" if key == "$ref" else key: item for key, item in items.items()}
    return items


def _to_text(value: Any) -> str:
    try:
        return str(replace_surrogates(json.dumps(value, default=str)))
    except (RecursionError, ValueError, TypeError):
        return f"[{type(value).__name__}, nested too deeply]"


def shortened(text: str, limit: int) -> str:
    """Return a text cut to ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def excerpt(value: Any, limit: int) -> str:
    """Return a value as errors show it: as ASCII, cut to ``limit`` characters."""
    return shortened(ascii(value), limit)
