"""Print a value as JSON: dataclasses as objects, times in ISO 8601, numbers that are not finite as null."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any


def to_json(value: Any) -> Any:
    """Return ``value`` as objects, lists, texts, numbers, booleans and None, without fields of bytes."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return {name: to_json(item) for name, item in fields.items() if not isinstance(item, bytes)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence | Set):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return str(value)


def print_json(value: Any) -> None:
    """Print one JSON value on one line of stdout. Characters other than ASCII are escaped."""
    print(json.dumps(to_json(value)), flush=True)
