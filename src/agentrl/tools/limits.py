"""Bound the calls to tools: how many run at a time, and how many start in a minute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.tools.specs import Limits, Options

_WINDOW_SECONDS = 60.0


class CallGate:
    """The limits of one server's calls, over all trajectories of this process."""

    def __init__(self, options: Options, base: Limits, *, connections: int) -> None:
        """``base`` holds the run's limits; ``connections`` bounds the server's calls in flight."""
        self._options = options
        self._base = base
        self._server = asyncio.Semaphore(connections)
        self._tools: dict[str, _ToolGate] = {}

    def limits(self, tool: str) -> Limits:
        """Return the limits of one tool."""
        return self._options.limits_of(tool, self._base)

    @asynccontextmanager
    async def enter(self, tool: str) -> AsyncIterator[Limits]:
        """Wait for a slot of ``tool``, first come, first served, and hold it; yield the tool's limits."""
        limits = self.limits(tool)
        gate = self._tools.setdefault(tool, _ToolGate(limits))
        async with gate.slots, self._server:
            await gate.wait()
            yield limits


class _ToolGate:
    """The slots and the rate of one tool. A burst of a tenth of a minute's calls may start at once."""

    def __init__(self, limits: Limits) -> None:
        self.slots = asyncio.Semaphore(limits.concurrency or 1_000_000)
        rate = limits.calls_per_minute
        self._interval = _WINDOW_SECONDS / rate if rate else 0.0
        self._burst = max(rate / 10, 1.0) if rate else 1.0
        self._next = 0.0

    async def wait(self) -> None:
        """Wait until the next call may start."""
        if self._interval == 0.0:
            return
        now = asyncio.get_running_loop().time()
        start = max(self._next, now - (self._burst - 1) * self._interval)
        self._next = start + self._interval
        await asyncio.sleep(max(start - now, 0.0))
