"""Plots reward with its running mean, and staleness below it, over the optimizer steps of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.documents.status import StepStatus
from agentrl.errors import AgentRLError, ConfigError
from agentrl.store.views.rows import StepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REWARD = "#1b6ca8"
_STALENESS = "#b35c1e"
_GRID = "#dddddd"


def plot_curve(run_name: str, steps: Sequence[StepRow], out: Path) -> None:
    """Draw the committed ``steps`` into ``out``, whose suffix names the format (.png, .svg, .pdf).

    Raises AgentRLError when no committed step has a reward, ConfigError when ``out`` cannot be written.
    """
    committed = sorted((step for step in steps if _is_drawn(step)), key=lambda step: step.step)
    if not committed:
        raise AgentRLError(
            f"run {run_name!r} has no committed optimizer step to plot",
            hint=f"`agentrl audit run --run_name {run_name}` shows how far it is",
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.0, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    reward_axes, staleness_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.4])
    _plot_reward(reward_axes, committed)
    _plot_staleness(staleness_axes, committed)
    reward_axes.set_title(f"{run_name}: {len(committed)} optimizer steps", loc="left", fontsize=11)
    staleness_axes.set_xlabel("optimizer step")
    staleness_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    staleness_axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    _save(figure, out)


def _is_drawn(step: StepRow) -> bool:
    return step.status is StepStatus.COMMITTED and _value(step, "reward") is not None


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window − 1`` values before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def _plot_reward(axes: Axes, steps: Sequence[StepRow]) -> None:
    x = [step.step for step in steps]
    rewards = [float(step.metrics["reward"]) for step in steps]
    window = max(3, len(steps) // 10)
    axes.plot(x, rewards, color=_REWARD, alpha=0.35, linewidth=1.2, marker="o", markersize=3, label="reward")
    axes.plot(x, running_mean(rewards, window), color=_REWARD, linewidth=2.2, label=f"mean of {window} steps")
    axes.set_ylabel("mean score of sampled trajectories")
    if all(0 <= reward <= 1 for reward in rewards):
        axes.set_ylim(-0.03, 1.03)
    _finish(axes)


def _plot_staleness(axes: Axes, steps: Sequence[StepRow]) -> None:
    lines = (("staleness_mean", "mean", 2.0, 1.0), ("staleness_max", "max", 1.2, 0.5))
    for key, label, width, alpha in lines:
        points = [(step.step, value) for step in steps if (value := _value(step, key)) is not None]
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=_STALENESS, linewidth=width, alpha=alpha,
            drawstyle="steps-mid", label=label,
        )  # fmt: skip
    axes.set_ylabel("staleness\n(steps)")
    axes.set_ylim(bottom=0)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _value(step: StepRow, key: str) -> float | None:
    value = step.metrics.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _save(figure: Any, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the plot cannot be written to {out}: {error}",
            hint="give --out a writable path that ends in .png, .svg or .pdf",
        ) from error
