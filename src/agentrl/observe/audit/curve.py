"""Plot reward with its running mean, and staleness below it, over the optimizer steps of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.documents.status import StepStatus
from agentrl.errors import AgentRLError
from agentrl.observe.plotting import COLORS, finish, label_steps, new_figure, save_figure
from agentrl.store.views.rows import StepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REWARD, _STALENESS = COLORS[:2]


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
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8.0, 5.6)
    reward_axes, staleness_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.4])
    _plot_reward(reward_axes, committed)
    _plot_staleness(staleness_axes, committed)
    reward_axes.set_title(f"{run_name}: {len(committed)} optimizer steps", loc="left", fontsize=11)
    label_steps(staleness_axes)
    staleness_axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    save_figure(figure, out, "--out")


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
    finish(axes)


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
    finish(axes)


def _value(step: StepRow, key: str) -> float | None:
    value = step.metrics.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
