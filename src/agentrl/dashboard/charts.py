"""Describe charts: a figure that plotly.js draws, and the same numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from markupsafe import Markup

from agentrl.observe.terminal import number

Kind = Literal["line", "area", "bar", "stack", "scatter", "histogram"]
Value = float | int | str | None
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Of lines by their order: where two coincide, the one below shows through the gaps of the one above."""
TABLE_ROWS = 50
"""Rows of a chart's table; of longer series it shows the last ones."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One named series of a chart: ``y`` over ``x``, of equal length. None and NaN are gaps."""

    name: str
    x: Sequence[Value]
    y: Sequence[Value]
    links: Sequence[str] = ()
    """The address that a click on a point opens, one per point, or none."""
    labels: Sequence[str] = ()
    """What a point's tooltip says besides its values, one per point, or none."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart for the macro ``chart`` of ``macros.html``.

    ``area`` and ``stack`` add the series up, as areas and as bars. ``histogram`` draws ``x`` as the bins'
    centers and ``y`` as their counts.
    """

    id: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    series: Sequence[Series]
    kind: Kind = "line"
    x_title: str = "step"
    y_title: str = ""
    help: str = ""
    """One sentence: what it is, and what a healthy run shows."""
    y_range: tuple[float, float] | None = None
    log_y: bool = False
    link_of_x: str | None = None
    """Address that a click on a point opens, which the point's x completes: ``/runs/a/steps/``."""

    @property
    def empty(self) -> bool:
        """Whether no series has a value."""
        return not any(_finite(value) is not None for series in self.series for value in series.y)

    def json(self) -> Markup:
        """Return the figure as JSON without a character that ends a script element."""
        figure = {
            "data": [self._trace(series, place) for place, series in enumerate(self.series)],
            "layout": {
                "xaxis": {"title": {"text": _plain(self.x_title)}},
                "yaxis": {
                    "title": {"text": _plain(self.y_title)},
                    **({"range": self.y_range} if self.y_range else {}),
                    **({"type": "log"} if self.log_y else {}),
                },
                **({"barmode": "stack"} if self.kind == "stack" else {}),
                **({"bargap": 0.02} if self.kind == "histogram" else {}),
                "showlegend": len(self.series) > 1,
                **({"meta": {"linkOfX": self.link_of_x}} if self.link_of_x else {}),
            },
        }
        text = orjson.dumps(figure).decode()
        for character in "<>&\u2028\u2029":
            text = text.replace(character, f"\\u{ord(character):04x}")
        return Markup(text)

    @property
    def columns(self) -> list[str]:
        """The column titles of the table."""
        return [self.x_title, *(series.name for series in self.series)]

    @property
    def rows(self) -> list[list[str]]:
        """The rows of the table: a value of x, and each series' value there."""
        table: dict[Value, list[str]] = {}
        for place, series in enumerate(self.series):
            for x, y in zip(series.x, series.y, strict=True):
                row = table.setdefault(
                    x, [number(x) if isinstance(x, float) else str(x), *[""] * len(self.series)]
                )
                row[place + 1] = y if isinstance(y, str) else number(y)
        return list(table.values())[-TABLE_ROWS:]

    def _trace(self, series: Series, place: int) -> dict[str, Any]:
        drawn: dict[str, Any] = {
            "name": _plain(series.name),
            "x": [_plain(x) if isinstance(x, str) else _finite(x) for x in series.x],
            "y": [_plain(y) if isinstance(y, str) else _finite(y) for y in series.y],
        }
        if self.kind in ("bar", "stack", "histogram"):
            drawn["type"] = "bar"
        else:
            drawn["type"] = "scatter"
            few = len(series.x) <= 60
            drawn["mode"] = "markers" if self.kind == "scatter" else "lines+markers" if few else "lines"
        if self.kind == "line":
            drawn["line"] = {"dash": _DASHES[place % len(_DASHES)]}
        if self.kind == "area":
            drawn |= {"stackgroup": "all", "mode": "lines"}
        if series.labels:
            drawn["text"] = [_plain(label) for label in series.labels]
        if series.links:
            drawn["customdata"] = list(series.links)
        return drawn


def _finite(value: Value) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _plain(text: str) -> str:
    """Return text that plotly.js shows as it is: it reads ``<b>``, ``<a href>`` and entities as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
