"""Make figures of one style and save them; matplotlib is imported at first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1b6ca8", "#b35c1e", "#2e7d4f", "#7a4b9c")
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
