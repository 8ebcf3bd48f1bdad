"""Small helpers with which the audit pages write numbers, times and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.observe.sanitize_terminal import clean

MISSING = "–"
_PIPE_WIDTH = 160


def stdout_console() -> Console:
    """A console on stdout; wide where the output goes to a file or pipe. Markup is off."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, text: int = 1) -> Table:
    """A table whose first ``text`` columns are left-aligned and whose others are right-aligned numbers."""
    built = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        built.add_column(Text(column), justify="left" if place < text else "right", overflow="fold")
    for row in rows:
        built.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row))
    return built


def fixed(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """``value`` with ``digits`` decimals, or a dash."""
    if value is None:
        return MISSING
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def versions(low: int | None, high: int | None) -> str:
    """A range of policy versions as a person writes it."""
    if low is None or high is None:
        return MISSING
    return str(low) if low == high else f"{low}–{high}"


def age(then: datetime | None, now: datetime) -> str:
    """How long ago ``then`` was, in the largest unit that is at least one."""
    if then is None:
        return MISSING
    seconds = max(0.0, (now - then).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
