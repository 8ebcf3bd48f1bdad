"""Await the parts of a long command: say on stderr which one runs and how long, and end at a stop signal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TextIO, TypeVar

from agentrl.base.concurrency import background, end_tasks, wait_for_any
from agentrl.observe.terminal import excerpt

T = TypeVar("T")

WORD_SECONDS = 3.0
"""Interval of lines."""
_COLUMNS = 80


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
        print(excerpt(f"{self._name}: {text}", _COLUMNS), file=self._out, flush=True)

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
