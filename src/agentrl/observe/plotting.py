"""Plot metrics over optimizer steps in figures of one style; matplotlib is imported at first use.

``steps`` are what ``Steps.metrics`` returns: the numbers of committed steps in order, each with its metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentRLError, ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

StepMetrics = Mapping[int, Mapping[str, float]]

COLORS = ("#1b6ca8", "#b35c1e", "#2e7d4f", "#7a4b9c")
_REWARD, _STALENESS = COLORS[:2]
_GRID = "#dddddd"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of ``width`` × ``height`` inches, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_steps(axes: Axes) -> None:
    """Name the horizontal axis by optimizer steps, in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def finish(axes: Axes) -> None:
    """Add the grid and the legend."""
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="best")


def save_figure(figure: Any, out: Path, flag: str) -> None:
    """Write a figure to ``out``, whose suffix names the format. Raises ConfigError, which names ``flag``."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the plot cannot be written to {out}: {error}",
            hint=f"give {flag} a writable path that ends in .png, .svg or .pdf",
        ) from error


def plot_curve(run_name: str, steps: StepMetrics, out: Path) -> None:
    """Draw reward and staleness of ``steps`` into ``out``, whose suffix names the format (.png, .svg, .pdf).

    Raises AgentRLError when no step has a reward, ConfigError when ``out`` cannot be written.
    """
    rewarded = {step: metrics for step, metrics in steps.items() if "reward" in metrics}
    if not rewarded:
        raise AgentRLError(
            f"run {run_name!r} has no committed optimizer step to plot",
            hint=f"`agentrl audit run --run_name {run_name}` shows how far it is",
        )
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8.0, 5.6)
    reward_axes, staleness_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.4])
    _plot_reward(reward_axes, rewarded)
    _plot_staleness(staleness_axes, rewarded)
    reward_axes.set_title(f"{run_name}: {len(rewarded)} optimizer steps", loc="left", fontsize=11)
    label_steps(staleness_axes)
    staleness_axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    save_figure(figure, out, "--out")


def metric_names(steps: StepMetrics) -> list[str]:
    """Return the names of the metrics that some step has, sorted."""
    return sorted({name for metrics in steps.values() for name in metrics})


def committed_values(run_name: str, steps: StepMetrics, names: Sequence[str]) -> dict[str, Any]:
    """Return ``{"run_name", "steps": [...], "metrics": {name: [...]}}``; None where a step has no value."""
    return {
        "run_name": run_name,
        "steps": list(steps),
        "metrics": {name: [metrics.get(name) for metrics in steps.values()] for name in names},
    }


def plot_metrics(run_name: str, steps: StepMetrics, names: Sequence[str], out: Path) -> None:
    """Draw each metric of ``names`` on axes of its own, one below the other, into ``out``.

    Raises ConfigError when ``out`` cannot be written.
    """
    figure = new_figure(8.0, 1.2 + 2.2 * len(names))
    rows = figure.subplots(len(names), 1, sharex=True, squeeze=False)
    for index, (axes, name) in enumerate(zip(rows[:, 0], names, strict=True)):
        values = _values(steps, name)
        axes.plot(
            list(values), list(values.values()), color=COLORS[index % len(COLORS)],
            linewidth=1.8, marker="o", markersize=3, label=name,
        )  # fmt: skip
        finish(axes)
    rows[0, 0].set_title(f"{run_name}: {len(steps)} optimizer steps", loc="left", fontsize=11)
    label_steps(rows[-1, 0])
    save_figure(figure, out, "--out")


def _values(steps: StepMetrics, name: str) -> dict[int, float]:
    """Return step → value of a metric, without the steps that lack it."""
    return {step: metrics[name] for step, metrics in steps.items() if name in metrics}


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window − 1`` values before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def _plot_reward(axes: Axes, steps: StepMetrics) -> None:
    x = list(steps)
    rewards = [metrics["reward"] for metrics in steps.values()]
    window = min(max(3, len(steps) // 10), len(steps))
    axes.plot(x, rewards, color=_REWARD, alpha=0.35, linewidth=1.2, marker="o", markersize=3, label="reward")
    axes.plot(x, running_mean(rewards, window), color=_REWARD, linewidth=2.2, label=f"mean of {window} steps")
    axes.set_ylabel("mean score of sampled trajectories")
    if all(0 <= reward <= 1 for reward in rewards):
        axes.set_ylim(-0.03, 1.03)
    finish(axes)


def _plot_staleness(axes: Axes, steps: StepMetrics) -> None:
    lines = (("staleness_mean", "mean", 2.0, 1.0), ("staleness_max", "max", 1.2, 0.5))
    for key, label, width, alpha in lines:
        values = _values(steps, key)
        axes.plot(
            list(values), list(values.values()), color=_STALENESS, linewidth=width, alpha=alpha,
            drawstyle="steps-mid", label=label,
        )  # fmt: skip
    axes.set_ylabel("staleness\n(steps)")
    axes.set_ylim(bottom=0)
    finish(axes)
