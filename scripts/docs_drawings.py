"""Draw the figures of docs/concepts.md: the states of each document, a TokenForest, the seconds of steps.

    python scripts/docs_drawings.py     writes docs/images/states_*.svg, forest.svg and step_seconds.svg

States and forest come from the code. The seconds are the stored metrics of a quickstart, as printed by
``agentrl audit curve seconds_data seconds_pack … --run_name quickstart --json``. A unit test compares the
files with a fresh drawing, so that a new state or edge cannot be left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from agentrl.data.forest import TokenForest, forest_from_sequences, merge_prefixes
from agentrl.documents.status import (
    DATA_EDGES,
    RECORD_EDGES,
    RECORD_REVISIONS,
    STEP_EDGES,
    TASK_EDGES,
    VERSION_EDGES,
)

IMAGES = Path(__file__).parents[1] / "docs" / "images"
Edges = Mapping[Any, frozenset[Any]]
EDGES: dict[str, tuple[Edges, Edges]] = {
    "task": (TASK_EDGES, {}),
    "record": (RECORD_EDGES, RECORD_REVISIONS),
    "data": (DATA_EDGES, {}),
    "step": (STEP_EDGES, {}),
    "version": (VERSION_EDGES, {}),
}
"""By drawing: the edges of every run, and those of ``agentrl db rescore`` and ``reopen``."""

_STYLE = (
    "<style>text{font:13px sans-serif;fill:#222}rect{fill:#eef3fb;stroke:#4a6fa5}path{fill:none;stroke:#555}"
    ".back{stroke:#b5651d}.admin{stroke:#b5651d;stroke-dasharray:4 3}.arrow{fill:#555;stroke:none}"
    ".b{fill:#b5651d;stroke:none}.sampled{fill:#fbe9d7}.bg{fill:#fff;stroke:none}</style>"
)
_WIDTH, _HEIGHT, _GAP = 92, 30, 34


def states_svg(edges: Edges, revisions: Edges) -> str:
    """Return a drawing of states in a row: forward edges above, backward ones below, revisions dashed."""
    states = list(edges)
    place = {state: number for number, state in enumerate(states)}
    arcs = [(a, b, "") for a in states for b in sorted(edges[a], key=lambda item: place[item])]
    arcs += [(a, b, "admin") for a in revisions for b in sorted(revisions[a], key=lambda item: place[item])]
    longest = max((abs(place[b] - place[a]) for a, b, _ in arcs), default=1)
    middle = 24 + 17 * longest
    parts = [_arc(place[a], place[b], kind, middle) for a, b, kind in arcs]
    for state, number in place.items():
        left = 12 + number * (_WIDTH + _GAP)
        parts.append(f'<rect x="{left}" y="{middle}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>')
        parts.append(_text(left + _WIDTH / 2, middle + 20, str(state)))
    width = 24 + len(states) * (_WIDTH + _GAP) - _GAP
    return _svg(width, 2 * middle + _HEIGHT, parts)


def _arc(start: int, end: int, kind: str, middle: int) -> str:
    forward = end > start
    shift = 14 if forward else -14
    x1 = 12 + start * (_WIDTH + _GAP) + _WIDTH / 2 + shift
    x2 = 12 + end * (_WIDTH + _GAP) + _WIDTH / 2 - shift
    if forward and end == start + 1 and not kind:
        x1, x2, y = x1 - shift + _WIDTH / 2, x2 + shift - _WIDTH / 2, middle + _HEIGHT / 2
        return f'<path d="M{x1:g} {y:g}H{x2 - 7:g}"/>' + _head(x2, y, (-8, -4, -8, 4), "arrow")
    high = 17 * abs(end - start)
    edge = middle if forward else middle + _HEIGHT
    top = edge - high if forward else edge + high
    style = kind or ("" if forward else "back")
    down = -8 if forward else 8
    path = (
        f'<path class="{style}" d="M{x1:g} {edge:g}C{x1:g} {top:g} {x2:g} {top:g} {x2:g} {edge + down:g}"/>'
    )
    return path + _head(x2, edge, (-4, down, 4, down), "b" if style else "arrow")


def _head(x: float, y: float, offsets: tuple[float, float, float, float], style: str) -> str:
    a, b, c, d = offsets
    return f'<path class="{style}" d="M{x:g} {y:g}L{x + a:g} {y + b:g}L{x + c:g} {y + d:g}Z"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle">{escape(text)}</text>'


def _svg(width: float, height: float, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    background = f'<rect class="bg" width="{width:g}" height="{height:g}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
        f"{_STYLE}{background}\n{body}\n</svg>\n"
    )


PATHS = (
    ("system", "6×7?", "call", "42", "answer"),
    ("system", "6×7?", "call", "41", "retry", "42", "answer"),
    ("system", "6×7?", "think", "answer"),
)
"""Three trajectories of a group; a word stands for the tokens of a message or a turn."""
GENERATED = ("call", "think", "answer", "retry")


def example_forest() -> TokenForest:
    """Return the forest of the three trajectories, merged as ``--prefix_merging group`` does."""
    words = sorted({word for path in PATHS for word in path})
    ids = [[words.index(word) for word in path] for path in PATHS]
    return merge_prefixes(
        forest_from_sequences(ids, [[word in GENERATED for word in path] for path in PATHS])
    )


def forest_svg() -> str:
    """Return a drawing of ``example_forest``: depth from left to right, one line per branch."""
    forest = example_forest()
    words = sorted({word for path in PATHS for word in path})
    line = [0] * forest.tokens
    lines = 0
    for index in range(1, forest.tokens):
        parent = int(forest.parent[index])
        lines += parent != index - 1
        line[index] = lines
    trained = set(forest.target.tolist())
    parts = []
    for index in range(forest.tokens):
        parent, depth = int(forest.parent[index]), int(forest.position_ids[index])
        left, top = 12 + depth * (_WIDTH + _GAP), 12 + line[index] * 56
        if parent >= 0:
            y, above = top + _HEIGHT / 2, 12 + line[parent] * 56 + _HEIGHT / 2
            bend = left - _GAP / 2
            parts.append(f'<path d="M{left - _GAP:g} {above:g}H{bend:g}V{y:g}H{left:g}"/>')
        style = ' class="sampled"' if index in trained else ""
        parts.append(f'<rect{style} x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>')
        parts.append(_text(left + _WIDTH / 2, top + 20, f"{index} {words[int(forest.input_ids[index])]}"))
    width = 24 + (forest.depth) * (_WIDTH + _GAP) - _GAP
    return _svg(width, 24 + (lines + 1) * 56 - 26, parts)


SECONDS = IMAGES / "quickstart_seconds.json"
PARTS = {
    "seconds_data": ("wait for data", "#c4c4c4"),
    "seconds_pack": ("pack", "#2a9d8f"),
    "seconds_forward": ("forward", "#7fa3d6"),
    "seconds_backward": ("backward", "#35588f"),
    "seconds_optimizer": ("optimizer", "#c0392b"),
    "seconds_publish": ("publish", "#e0a15e"),
}
"""Metric of a step -> its words and colour."""


def seconds_svg() -> str:
    """Return bars, one per step of ``SECONDS``: the parts of a step from left to right, 20 units a second."""
    stored = json.loads(SECONDS.read_text(encoding="utf-8"))
    parts, left = [], 12.0
    for label, colour in PARTS.values():
        parts.append(_bar(left, 12, 14, 14, colour))
        parts.append(f'<text x="{left + 20:g}" y="24">{label}</text>')
        left += 48 + 7 * len(label)
    widest, top = left, 44
    for row, step in enumerate(stored["steps"]):
        parts.append(f'<text x="12" y="{top + 15}">step {step}</text>')
        left = 70.0
        for name, (_, colour) in PARTS.items():
            width = round(20 * stored["metrics"][name][row], 1)
            parts.append(_bar(left, top, width, 20, colour))
            left += width
        parts.append(f'<text x="{left + 6:g}" y="{top + 15}">{(left - 70) / 20:.1f} s</text>')
        widest, top = max(widest, left + 60), top + 26
    return _svg(round(widest), top + 6, parts)


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect style="fill:{colour};stroke:none" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
    )


def drawings() -> dict[str, str]:
    """Return every drawing by its file name."""
    files = {f"states_{name}.svg": states_svg(*edges) for name, edges in EDGES.items()}
    return {**files, "forest.svg": forest_svg(), "step_seconds.svg": seconds_svg()}


if __name__ == "__main__":
    for name, svg in drawings().items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
