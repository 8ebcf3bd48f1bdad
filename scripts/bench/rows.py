"""A benchmark's rows: a ratio beside its target, printed as one table."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 150


@dataclass(frozen=True, kw_only=True)
class Row:
    """One ratio beside its target; less is better where ``more`` is False.

    A row without a target is for reading only. A row without a baseline has no ratio.
    """

    what: str
    ours: str
    baseline: str
    ratio: float | None
    target: float | None = None
    more: bool = True

    @property
    def passed(self) -> bool | None:
        """Whether the ratio meets its target; None where there is none."""
        if self.target is None or self.ratio is None:
            return None
        return self.ratio >= self.target if self.more else self.ratio <= self.target

    def plain(self) -> dict[str, Any]:
        """The row for the JSON file."""
        return {**asdict(self), "passed": self.passed}


def print_rows(what: str, rows: list[Row]) -> None:
    """The table, on stdout, titled with what was measured, when, and on which machine."""
    where = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}"
    title = f"{what}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {where}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("measured", "ours", "baseline", "ratio", "target", ""):
        table.add_column(name, justify="left" if name in ("measured", "") else "right")
    verdicts = {True: "pass", False: "FAIL", None: ""}
    for row in rows:
        limit = "–" if row.target is None else f"{'≥' if row.more else '≤'} {row.target:g}"
        reached = "–" if row.ratio is None else f"{row.ratio:.3g}"
        table.add_row(row.what, row.ours, row.baseline, reached, limit, verdicts[row.passed])
    Console(width=_WIDTH, markup=False, highlight=False).print(table)
