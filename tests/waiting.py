"""Bounded waits for what another task, thread or process does."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

_POLL_SECONDS = 0.02


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 30.0) -> None:
    """Wait in an event loop until ``condition`` holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        held = condition()
        if await held if inspect.isawaitable(held) else held:
            return
        assert time.monotonic() < deadline, f"the condition did not come true within {seconds:g} s"
        await asyncio.sleep(_POLL_SECONDS)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until ``condition`` holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not come true within {seconds:g} s"
        time.sleep(_POLL_SECONDS)
