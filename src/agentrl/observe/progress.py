"""Show the progress of a command on stderr: a bar on a terminal, a line every few seconds elsewhere.

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
"""Time between two lines where stderr is not a terminal."""


class Work:
    """Counts what is done; ``total`` is None if it is not known."""

    def __init__(self, title: str, total: float | None) -> None:
        self.title = title
        self.total = total
        self.done = 0.0

    def advance(self, by: float = 1.0) -> None:
        """Count ``by`` more as done."""
        self.done += by

    def describe(self, title: str, total: float | None = None) -> None:
        """Begin the next part of the work: another title, counted from 0."""
        self.title, self.total, self.done = title, total, 0.0

    def line(self, seconds: float) -> str:
        """Return the present state as one line of text."""
        of = "" if self.total is None else f" of {self.total:,.0f}"
        count = f": {self.done:,.0f}{of}" if self.done or self.total is not None else ""
        return f"{self.title}{count}, {seconds:.0f} s"


@contextmanager
def progress(
    title: str,
    total: float | None = None,
    *,
    stream: TextIO | None = None,
    first_seconds: float = FIRST_SECONDS,
    line_seconds: float = LINE_SECONDS,
) -> Iterator[Work]:
    """Show the progress of the block, which counts by ``Work.advance``, until it ends.

    A thread of its own draws, so that a blocking call in the block does not stop the clock.
    """
    work, out = Work(title, total), stream or sys.stderr
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
            of = "" if work.total is None else f"/{work.total:,.0f}"
            bars.update(
                task, description=work.title, total=work.total, completed=work.done,
                count=f"{work.done:,.0f}{of}" if work.done else "",
            )  # fmt: skip
