"""Plot the evaluations of a run's versions over optimizer steps, with their intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.documents.evaluation import Evaluation
from agentrl.errors import AgentRLError, ConfigError
from agentrl.observe.terminal import clean

_COLORS = ("#1b6ca8", "#b35c1e", "#2e7d4f", "#7a4b9c")


def plot_evaluations(run_name: str, evaluations: Sequence[Evaluation], out: Path) -> None:
    """Draw score and pass@1 over steps into ``out``, whose suffix names the format (.png, .svg, .pdf).

    Each set of tasks and settings has a colour of its own. Raises AgentRLError without a finished
    evaluation of a version, ConfigError when ``out`` cannot be written.
    """
    lines: dict[tuple[str, str], list[Evaluation]] = defaultdict(list)
    for item in evaluations:
        if item.step is not None and ((item.results or {}).get("total") or {}).get("score"):
            lines[item.tasks_digest, item.settings_digest].append(item)
    if not lines:
        raise AgentRLError(
            f"run {run_name!r} has no finished evaluation of a policy version to plot",
            hint="`agentrl eval --eval_steps N` evaluates the versions of a run",
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, members in enumerate(lines.values()):
        color = _COLORS[place % len(_COLORS)]
        members.sort(key=lambda item: item.step or 0)
        name = clean(Path(members[0].file).name)
        _draw(axes, members, ("score",), color, "-", f"score, {name}")
        _draw(axes, members, ("pass_at", "1"), color, "--", f"pass@1, {name}")
    axes.set_title(f"{run_name}: evaluations, 95 % intervals over tasks", loc="left", fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="best")
    _save(figure, out)


def _draw(
    axes: Any, members: Sequence[Evaluation], path: Sequence[str], color: str, style: str, label: str
) -> None:
    points = []
    for item in members:
        value: Any = (item.results or {})["total"]
        for key in path:
            value = value.get(key) if value else None
        if value:
            points.append((item.step, value["value"], value["low"], value["high"]))
    x, y, low, high = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [], [])
    axes.plot(x, y, style, color=color, marker="o", markersize=4, linewidth=1.8, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)


def _save(figure: Any, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the plot cannot be written to {out}: {error}",
            hint="give --plot a writable path that ends in .png, .svg or .pdf",
        ) from error
