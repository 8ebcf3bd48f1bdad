"""Show a comparison of what-ifs: a table for the terminal, and one HTML file that needs no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from rich.console import Console

from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError
from agentrl.evaluation.whatif import CURVES, Child, Comparison
from agentrl.observe.plotting import COLORS
from agentrl.observe.terminal import MISSING, finite, number, table

_WIDTH, _HEIGHT, _MARGIN = 420, 150, 8
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222 }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } tr { border-bottom: 1px solid #ddd }
th, td { padding: .2rem .7rem; text-align: right } th:first-child, td:first-child { text-align: left }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(25rem, 1fr)); gap: 1rem }
figure { margin: 0 } figcaption { font-weight: 600 } svg { width: 100%; background: #fafafa }
td.text { font: 13px ui-monospace, monospace; white-space: pre-wrap; text-align: left }
mark { background: #ffe08a } .key span { margin-right: 1rem } .note { color: #666 }
"""


def print_comparison(console: Console, found: Comparison) -> None:
    """Print the means over the steps, and how far each what-if is from the parent."""
    first, last = _ends(found)
    rows = _means_of(found)
    console.print(table(f"Steps {first}-{last} of {found.parent}: means", _COLUMNS, rows))


def write_page(found: Comparison, out: Path) -> None:
    """Write the page. Raises ConfigError for a file that cannot be written."""
    first, last = _ends(found)
    runs = [(found.parent, found.steps), *((child.name, child.steps) for child in found.children)]
    title = f"Steps {first}-{last} of {escape(found.parent)}, trained again"
    page = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>',
        f"<h1>{title}</h1>",
        _table(["run", "differs in"], [[child.name, _differs(child)] for child in found.children]),
        _table(_COLUMNS, _means_of(found)),
        f"<h2>Curves</h2>{_key([name for name, _ in runs])}<div class=charts>",
        *(_chart(metric, [steps for _, steps in runs]) for metric in CURVES),
        "</div><h2>Tokens</h2><p class=note>The weight of a token is −∂loss/∂log π: above 0, the update makes"
        " it more likely. It is computed from the stored ratios of the step, without the KL to a reference"
        " and the entropy bonus. Tokens are ordered by the difference between the two vectors of weights,"
        " each scaled to length 1.</p>",
        *(_tokens(found.parent, child) for child in found.children),
        "<h2>Weights</h2>",
        *(_layers(found.parent, child) for child in found.children),
        "</html>",
    ]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", hint="give another --out") from error


_COLUMNS = ["run", *CURVES, "token cosine", "weights apart"]


def _ends(found: Comparison) -> tuple[int, int]:
    return min(found.steps, default=0), max(found.steps, default=0)


def _means_of(found: Comparison) -> list[list[str]]:
    rows = [[found.parent, *_means(found.steps), MISSING, MISSING]]
    for child in found.children:
        cosine = MISSING if child.tokens is None else f"{child.tokens.cosine:.3f}"
        apart = MISSING if child.distance is None else f"{child.distance:.1e}"
        rows.append([child.name, *_means(child.steps), cosine, apart])
    return rows


def _means(steps: Mapping[int, TrainStep]) -> list[str]:
    columns = [[value for _, value in _points(steps, name)] for name in CURVES]
    return [number(math.fsum(values) / len(values)) if values else MISSING for values in columns]


def _points(steps: Mapping[int, TrainStep], metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of the steps that have a value."""
    values = ((at, finite(step.metrics.get(metric))) for at, step in steps.items())
    return [(at, value) for at, value in values if value is not None]


def _differs(child: Child) -> str:
    listed = [f"{name}: {old} → {new}" for name, (old, new) in child.changed.items()]
    if child.without:
        listed.append(f"{child.without} Records left out")
    return ", ".join(listed) or "nothing"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _key(names: Sequence[str]) -> str:
    spans = (f'<span style="color:{_color(i)}">■ {escape(name)}</span>' for i, name in enumerate(names))
    return f"<p class=key>{''.join(spans)}</p>"


def _chart(metric: str, runs: Sequence[Mapping[int, TrainStep]]) -> str:
    """Return a figure with a line per run, the parent's beneath the others'; empty without a value."""
    lines = [_points(steps, metric) for steps in runs]
    points = [point for line in lines for point in line]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = (x - left) / ((right - left) or 1)
        up = (y - low) / ((high - low) or 1)
        return f"{across * _WIDTH:.1f},{(1 - up) * _HEIGHT:.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{_color(i)}" stroke-width="{3 if i == 0 else 1.5}"'
        f' points="{" ".join(place(*point) for point in line)}"/>'
        for i, line in enumerate(lines)
    )
    caption = f"{metric} <span class=note>{number(low)} to {number(high)}, steps {left}-{right}</span>"
    box = f"{-_MARGIN} {-_MARGIN} {_WIDTH + 2 * _MARGIN} {_HEIGHT + 2 * _MARGIN}"
    picture = f'<svg viewBox="{box}" role="img" aria-label="{metric}">{drawn}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{picture}</figure>"


def _tokens(parent: str, child: Child) -> str:
    found = child.tokens
    if found is None:
        return f"<h3>{escape(child.name)}</h3><p class=note>Both runs store no values of single tokens.</p>"
    rows = "".join(
        f"<tr><td class=text>{escape(item.before)}<mark>{escape(item.token)}</mark>{escape(item.after)}</td>"
        f"<td>{item.parent:+.2e}</td><td>{item.child:+.2e}</td><td>{escape(item.record)}</td></tr>"
        for item in found.changes
    )
    return (
        f"<h3>{escape(child.name)}, step {found.step}</h3><p>{found.count:,} tokens; cosine of the weights"
        f" {found.cosine:.4f}. {found.only[0]:,} tokens have a weight in {escape(parent)} alone,"
        f" {found.only[1]:,} in {escape(child.name)} alone.</p><table><tr><th>token</th>"
        f"<th>{escape(parent)}</th><th>{escape(child.name)}</th><th>Record</th></tr>{rows}</table>"
    )


def _layers(parent: str, child: Child) -> str:
    name = escape(child.name)
    if not child.layers:
        return f"<h3>{name}</h3><p class=note>{escape(child.no_layers or '')}</p>"
    rows = [
        [item.layer, f"{item.difference:.3e}", f"{item.norm:.4g}", f"{item.relative:.1e}"]
        for item in child.layers
    ]
    columns = ["layer", "‖difference‖", f"‖{parent}‖", "relative"]
    return f"<h3>{name} after step {max(child.steps)}</h3>{_table(columns, rows)}"
