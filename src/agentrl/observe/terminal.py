"""Write values: for people as numbers, times and tables without control characters; for programs as JSON.

Ask people before something is deleted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.errors import ConfigError

T = TypeVar("T")
MISSING = "–"
_PIPE_WIDTH = 160
_ESCAPE_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colors, cursor
    r"|(?:\x1b\]|\x9d).*?(?:\x07|\x1b\\|\x9c|\n|$)"  # OSC: titles, links
    r"|\x1b[PX^_].*?(?:\x1b\\|\x9c|\n|$)"  # DCS, SOS, PM, APC
    r"|\x1b."
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(value: object) -> str:
    """Return ``value`` as text without escape sequences, control and bidirectional-override characters.

    Use it for all text from a model, a tool or a task file.
    """
    text = str(value).replace("\r\n", "\n")
    return _CONTROL.sub("", _ESCAPE_SEQUENCES.sub("", text))


def plain(value: object, style: str = "") -> Text:
    """Return ``clean(value)`` as a rich Text, whose brackets are not read as markup."""
    return Text(clean(value), style=style)


def excerpt(value: object, limit: int) -> str:
    """Return the cleaned text on one line, cut to ``limit`` characters."""
    line = " ".join(clean(value).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def stdout_console() -> Console:
    """Return a console on stdout without markup; it is wide if the output goes to a file or a pipe."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, text: int = 1) -> Table:
    """Return a table; the first ``text`` columns are left-aligned, the others are right-aligned numbers."""
    built = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        built.add_column(Text(column), justify="left" if index < text else "right", overflow="fold")
    for row in rows:
        built.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row))
    return built


def table_of(
    title: str, items: Iterable[T], *columns: tuple[str, Callable[[T], object]], text: int = 1
) -> Table:
    """Return a table with a row for each item; a column is its title and what it shows of an item."""
    rows = [[show(item) for _, show in columns] for item in items]
    return table(title, [name for name, _ in columns], rows, text=text)


def fixed(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """Return ``value`` with ``digits`` decimals; a dash for None."""
    if value is None:
        return MISSING
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def finite(value: object) -> float | int | None:
    """Return a finite number; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def number(value: Any, digits: int = 3) -> str:
    """Return a number with ``digits`` significant decimals; a dash for anything but a finite number."""
    if finite(value) is None:
        return MISSING
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    if value and abs(value) < 10**-digits:
        return f"{value:.{max(0, digits - 2)}e}"
    if abs(value) >= 100:
        digits = max(0, digits - 2) if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}"


def signed(value: Any, digits: int = 2) -> str:
    """Return a number with its sign and ``digits`` decimals; a dash for anything but a finite number."""
    return MISSING if number(value) == MISSING else f"{value:+.{digits}f}"


def percent(value: Any, digits: int = 0) -> str:
    """Return a fraction as a percentage."""
    shown = number(value)
    return shown if shown == MISSING else f"{100 * value:.{digits}f} %"


def duration(seconds: Any) -> str:
    """Return seconds as text: ``350 ms``, ``12.5 s``, ``3 min 20 s``, ``5 h 02 min``, ``2 d 3 h``."""
    if number(seconds) == MISSING:
        return MISSING
    if abs(seconds) < 1:
        return f"{seconds * 1000:.0f} ms"
    if abs(seconds) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for name, size, smaller, unit in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // unit} {smaller}"
    return f"{whole} s"


def versions(low: int | None, high: int | None) -> str:
    """Return a range of policy versions as text, such as ``3–5`` or ``3``."""
    if low is None or high is None:
        return MISSING
    return str(low) if low == high else f"{low}–{high}"


def age(then: datetime | None, now: datetime) -> str:
    """Return how long ago ``then`` was, such as ``5 min ago``; a dash for None."""
    if then is None:
        return MISSING
    seconds = max(0.0, (now - then).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


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


def confirm(what: str) -> bool:
    """Ask on the terminal whether to delete ``what``. Raises ConfigError without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody can be asked whether to delete {what}", hint="give --yes")
    print(f"delete {what}? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
