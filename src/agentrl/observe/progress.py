"""Show progress: of a command as a bar or lines, of its parts, of training as one line per optimizer step."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from agentrl.base.concurrency import background, end_tasks, wait_for_any
from agentrl.observe.terminal import MISSING, excerpt, finite

FIRST_SECONDS = 2.0
"""Work that is done by then shows nothing."""

LINE_SECONDS = 5.0
"""Time between two lines where the stream is not a terminal."""


class Work:
    """Counts what is done; ``total`` is None if it is not known. ``unit`` follows the numbers."""

    def __init__(
        self,
        title: str,
        total: float | None,
        unit: str = "",
        measure: Callable[[], float] | None = None,
    ) -> None:
        """``measure`` returns how much is done, whenever the state is shown."""
        self.title = title
        self.total = total
        self.unit = unit
        self.done = 0.0
        self._measure = measure

    def advance(self, by: float = 1.0) -> None:
        """Count ``by`` more as done."""
        self.done += by

    def describe(self, title: str, total: float | None = None) -> None:
        """Begin the next part of the work: another title, counted from 0."""
        self.title, self.total, self.done = title, total, 0.0

    def line(self, seconds: float) -> str:
        """Return the present state as one line of text."""
        count = self.count(" of ")
        return f"{self.title}{f': {count}' if count else ''}, {seconds:.0f} s"

    def count(self, of: str) -> str:
        """Return what is done ``of`` the total, if no more is done; empty if neither is known."""
        if self._measure is not None:
            self.done = self._measure()
        if not self.done and self.total is None:
            return ""
        total = "" if self.total is None or self.done > self.total else f"{of}{self.total:,.0f}"
        return f"{self.done:,.0f}{total}{self.unit}"


@contextmanager
def progress(
    title: str,
    total: float | None = None,
    *,
    unit: str = "",
    measure: Callable[[], float] | None = None,
    stream: TextIO | None = None,
    first_seconds: float = FIRST_SECONDS,
    line_seconds: float = LINE_SECONDS,
) -> Iterator[Work]:
    """Show the progress of the block on ``stream`` (default: stderr), until it ends.

    The block counts by ``Work.advance``; or ``measure`` returns how much is done. A thread of its own draws,
    so that a blocking call in the block does not stop the clock.
    """
    out = stream or sys.stderr
    work, ended = Work(title, total, unit, measure), threading.Event()
    thread = threading.Thread(
        target=_draw, args=(work, out, ended, first_seconds, line_seconds), daemon=True, name="progress"
    )
    thread.start()
    try:
        yield work
    finally:
        ended.set()
        thread.join(1.0)


def _draw(work: Work, out: TextIO, ended: threading.Event, first_seconds: float, line_seconds: float) -> None:
    began = time.monotonic()
    if ended.wait(first_seconds):
        return
    if out.isatty():
        _show_bar(work, out, ended)
        return
    while True:
        print(work.line(time.monotonic() - began), file=out, flush=True)
        if ended.wait(line_seconds):
            return


def _show_bar(work: Work, out: TextIO, ended: threading.Event) -> None:
    console = Console(file=out, markup=False, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(),
        TextColumn("{task.fields[count]}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(work.title, total=work.total, count="")
        while not ended.wait(0.2):
            count = work.count("/")
            bars.update(task, description=work.title, total=work.total, completed=work.done, count=count)


HEADER_EVERY = 20
_SECONDS = (
    "seconds_data", "seconds_forward_backward", "seconds_optimizer", "seconds_publish", "seconds_device",
)  # fmt: skip


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
            titles = "".join(f"  {column.title:>{column.width}}" for column in _COLUMNS)
            self._print(Text(f"{'step':>9}{titles}", style="bold"))
        self._lines += 1
        line = Text(f"{label:>9}")
        for column in _COLUMNS:
            line.append(f"  {column.show(metrics):>{column.width}}", style=column.style)
        self._print(line)

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


def metric_text(metrics: Mapping[str, Any], key: str, form: str) -> str:
    """Return ``metrics[key]`` in format ``form``; a dash if it is missing, not a number, or not finite."""
    value = finite(metrics.get(key))
    return MISSING if value is None else format(value, form)


def _show(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda metrics: metric_text(metrics, key, form)


def _show_both(one: str, form: str, other: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda metrics: f"{metric_text(metrics, one, form)}/{metric_text(metrics, other, '.0f')}"


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
    _Column("stale", 7, _show_both("staleness_mean", ".2f", "staleness_max"), "cyan"),
    _Column("tok/s", 7, _show("tokens_per_second", ",.0f")),
    _Column("shared", 6, _show("sharing_ratio", ".2f")),
    _Column("mfu", 6, _show("mfu", ".1%")),
    _Column("open/ready", 10, _show_both("groups_open", ".0f", "groups_ready"), "cyan"),
    _Column("seconds", 7, _seconds),
)


T = TypeVar("T")

WORD_SECONDS = 3.0
"""Interval of lines."""
_WIDTH = 80


class StoppedError(Exception):
    """A signal asked the command to stop."""


class Parts:
    """Says on stderr what a command does, and for how long."""

    def __init__(self, name: str, stop: asyncio.Event, out: TextIO | None = None) -> None:
        self._name = name
        self._stop = stop
        self._out = out or sys.stderr
        self._what = "starting"
        self._since = time.monotonic()
        self._detail = ""

    def say(self, text: str) -> None:
        """Print one line of at most 80 columns."""
        print(excerpt(f"{self._name}: {text}", _WIDTH), file=self._out, flush=True)

    def tell(self, detail: str) -> None:
        """Add ``detail`` to the next lines, until the current work ends."""
        self._detail = detail

    async def until(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, which is described as ``what``. Raises StoppedError at a stop signal."""
        self._what, self._since, self._detail = what, time.monotonic(), ""
        task = asyncio.create_task(work)
        try:
            await wait_for_any(self._stop, tasks=[task], timeout=None)
            if self._stop.is_set():
                raise StoppedError(what)
            return task.result()
        finally:
            await end_tasks(task)

    @asynccontextmanager
    async def lines(self) -> AsyncIterator[None]:
        """Print a line every ``WORD_SECONDS`` inside the block."""
        async with background(self._print()):
            yield

    async def _print(self) -> None:
        while True:
            await asyncio.sleep(WORD_SECONDS)
            seconds = time.monotonic() - self._since
            detail = f": {self._detail}" if self._detail else ""
            with contextlib.suppress(OSError):  # the terminal may be gone; the evaluation goes on
                self.say(f"{self._what} ({seconds:.0f} s){detail}")
