"""Print one aligned line per optimizer step: colored on a terminal, plain elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

HEADER_EVERY = 20
MISSING = "–"
_SECONDS = ("seconds_data", "seconds_forward_backward", "seconds_optimizer", "seconds_publish")


@dataclass(frozen=True)
class _Column:
    """One column; ``show`` returns the text of a cell from the metrics of a step."""

    title: str
    width: int
    show: Callable[[Mapping[str, Any]], str]
    style: str = ""


class StepView:
    """Prints one line per step, and the header every ``HEADER_EVERY`` lines."""

    def __init__(self, console: Console | None = None, *, max_steps: int = -1) -> None:
        """Show ``max_steps`` beside the step if it is above 0. The default console writes to stdout."""
        self._console = console or Console(highlight=False)
        self._max_steps = max_steps
        self._lines = 0

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the line of ``step``; keys as in TrainStep.metrics, and a missing value prints as a dash."""
        label = f"{step}/{self._max_steps}" if self._max_steps > 0 else str(step)
        if self._lines % HEADER_EVERY == 0:
            self._print(Text(_row("step", [column.title for column in _COLUMNS]), style="bold"))
        self._lines += 1
        line = Text(f"{label:>9}")
        for column in _COLUMNS:
            line.append(f"  {column.show(metrics):>{column.width}}", style=column.style)
        self._print(line)

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


def _row(label: str, cells: list[str]) -> str:
    widths = [column.width for column in _COLUMNS]
    return f"{label:>9}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def number(metrics: Mapping[str, Any], key: str, form: str) -> str:
    """Return ``metrics[key]`` in format ``form``; a dash if it is missing, not a number, or not finite."""
    value = metrics.get(key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return MISSING
    return format(value, form)


def _show(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda metrics: number(metrics, key, form)


def _staleness(metrics: Mapping[str, Any]) -> str:
    return f"{number(metrics, 'staleness_mean', '.2f')}/{number(metrics, 'staleness_max', '.0f')}"


def _queues(metrics: Mapping[str, Any]) -> str:
    return f"{number(metrics, 'groups_open', '.0f')}/{number(metrics, 'groups_ready', '.0f')}"


def seconds_of(metrics: Mapping[str, Any]) -> float | None:
    """Return the seconds of a step: data, computation and publication; None if none of them was measured."""
    parts = [metrics[key] for key in _SECONDS if isinstance(metrics.get(key), int | float)]
    return float(sum(parts)) if parts else None


def _seconds(metrics: Mapping[str, Any]) -> str:
    seconds = seconds_of(metrics)
    return MISSING if seconds is None else f"{seconds:.1f}"


_COLUMNS = (
    _Column("reward", 6, _show("reward", ".3f"), "bold green"),
    _Column("pass", 5, _show("pass_rate", ".2f"), "green"),
    _Column("loss", 9, _show("loss", "+.2e")),
    _Column("KL(μ‖π)", 8, _show("kl_k3", ".1e")),
    _Column("grad", 7, _show("grad_norm", ".3g")),
    _Column("stale", 7, _staleness, "cyan"),
    _Column("tok/s", 7, _show("tokens_per_second", ",.0f")),
    _Column("shared", 6, _show("sharing_ratio", ".2f")),
    _Column("mfu", 6, _show("mfu", ".1%")),
    _Column("open/ready", 10, _queues, "cyan"),
    _Column("seconds", 7, _seconds),
)
