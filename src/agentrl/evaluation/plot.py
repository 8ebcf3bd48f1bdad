"""Plot the evaluations of a run's versions over optimizer steps, with their intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.documents.run import Evaluation
from agentrl.errors import AgentRLError
from agentrl.observe.plotting import COLORS, finish, label_steps, new_figure, save_figure
from agentrl.observe.terminal import clean


def plot_evaluations(run_name: str, evaluations: Sequence[Evaluation], out: Path) -> None:
    """Draw score and pass@1 over steps into ``out``, whose suffix names the format (.png, .svg, .pdf).

    Each set of tasks and settings has a colour of its own. Raises AgentRLError without a finished
    evaluation of a version, ConfigError when ``out`` cannot be written.
    """
    lines: dict[tuple[str, str], list[Evaluation]] = defaultdict(list)
    for item in evaluations:
        if item.step is not None and item.total.get("score"):
            lines[item.tasks_digest, item.settings_digest].append(item)
    if not lines:
        raise AgentRLError(
            f"run {run_name!r} has no finished evaluation of a policy version to plot",
            hint="`agentrl eval --eval_steps N` evaluates the versions of a run",
        )
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    for place, members in enumerate(lines.values()):
        color = COLORS[place % len(COLORS)]
        members.sort(key=lambda item: item.step or 0)
        name = clean(Path(members[0].file).name)
        _draw(axes, members, ("score",), color, "-", f"score, {name}")
        _draw(axes, members, ("pass_at", "1"), color, "--", f"pass@1, {name}")
    axes.set_title(f"{run_name}: evaluations, 95 % intervals over tasks", loc="left", fontsize=11)
    label_steps(axes)
    finish(axes)
    save_figure(figure, out, "--plot")


def _draw(
    axes: Any, members: Sequence[Evaluation], path: Sequence[str], color: str, style: str, label: str
) -> None:
    points = []
    for item in members:
        value: Any = item.total
        for key in path:
            value = value.get(key) if value else None
        if value:
            points.append((item.step, value["value"], value["low"], value["high"]))
    x, y, low, high = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [], [])
    axes.plot(x, y, style, color=color, marker="o", markersize=4, linewidth=1.8, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
