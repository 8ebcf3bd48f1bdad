"""Bound the time of a piece of work, and stop its clock while it waits in a queue of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_current: ContextVar[Deadline | None] = ContextVar("agentrl_deadline", default=None)


def current_deadline() -> Deadline | None:
    """Return the deadline that the running code must keep; None without one."""
    return _current.get()


class Deadline:
    """A time limit of ``seconds``, from now on. Time in ``paused`` does not count."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._since: float | None = asyncio.get_running_loop().time()
        """When the clock was started; None while it is stopped."""
        self._pauses = 0
        self._timeout: asyncio.Timeout | None = None

    def left(self) -> float:
        """Return the seconds that are left."""
        if self._since is None:
            return self._left
        return self._left - (asyncio.get_running_loop().time() - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock. The code inside bounds its waits itself."""
        self._pauses += 1
        if self._pauses == 1:
            self._left, self._since = self.left(), None
            self._reschedule()
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._since = asyncio.get_running_loop().time()
                self._reschedule()

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Raise TimeoutError when no time is left, as ``asyncio.timeout``; be the ``current_deadline``."""
        token = _current.set(self)
        try:
            async with asyncio.timeout(max(0.0, self.left())) as self._timeout:
                yield
        finally:
            self._timeout = None
            _current.reset(token)

    def _reschedule(self) -> None:
        if self._timeout is None or self._timeout.expired():
            return
        loop = asyncio.get_running_loop()
        self._timeout.reschedule(None if self._since is None else loop.time() + max(0.0, self._left))
