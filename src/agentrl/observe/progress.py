"""Show the progress of a command: a bar on a terminal, a line every few seconds elsewhere.

Work that ends within ``FIRST_SECONDS`` shows nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

FIRST_SECONDS = 2.0
"""Work that is done by then shows nothing."""

LINE_SECONDS = 5.0
"""Time between two lines where the stream is not a terminal."""


class Work:
    """Counts what is done; ``total`` is None if it is not known. ``unit`` follows the numbers."""

    def __init__(self, title: str, total: float | None, unit: str = "") -> None:
        self.title = title
        self.total = total
        self.unit = unit
        self.done = 0.0

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
        """Return what is done ``of`` the total; empty if neither is known."""
        if not self.done and self.total is None:
            return ""
        total = "" if self.total is None else f"{of}{self.total:,.0f}"
        return f"{self.done:,.0f}{total}{self.unit}"


class _Measured(Work):
    """Counts by asking ``measure`` whenever the state is shown."""

    def __init__(self, title: str, total: float | None, unit: str, measure: Callable[[], float]) -> None:
        super().__init__(title, total, unit)
        self._measure = measure

    def count(self, of: str) -> str:
        """Ask, then return what is done."""
        self.done = self._measure()
        return super().count(of)


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
    work = Work(title, total, unit) if measure is None else _Measured(title, total, unit, measure)
    ended = threading.Event()
    show = _show_bar if out.isatty() else _show_lines
    thread = threading.Thread(
        target=_run, args=(show, work, out, ended, first_seconds, line_seconds), daemon=True, name="progress"
    )
    thread.start()
    try:
        yield work
    finally:
        ended.set()
        thread.join(1.0)


_Show = Callable[[Work, TextIO, threading.Event, float, float], None]


def _run(
    show: _Show, work: Work, out: TextIO, ended: threading.Event, first_seconds: float, line_seconds: float
) -> None:
    began = time.monotonic()
    if not ended.wait(first_seconds):
        show(work, out, ended, began, line_seconds)


def _show_lines(work: Work, out: TextIO, ended: threading.Event, began: float, seconds: float) -> None:
    while True:
        print(work.line(time.monotonic() - began), file=out, flush=True)
        if ended.wait(seconds):
            return


def _show_bar(work: Work, out: TextIO, ended: threading.Event, began: float, seconds: float) -> None:
    console = Console(file=out, markup=False, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(),
        TextColumn("{task.fields[count]}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(work.title, total=work.total, count="")
        while not ended.wait(0.2):
            count = work.count("/")
            bars.update(
                task, description=work.title, total=work.total, completed=work.done, count=count
            )  # fmt: skip
