"""Bounded waits for what another task, thread or process does."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

_POLL_SECONDS = 0.02


async def comes_true(
    condition: Callable[[], bool | Awaitable[bool]], seconds: float, every: float = _POLL_SECONDS
) -> bool:
    """Wait in an event loop until ``condition`` holds; return whether it does within ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        held = condition()
        if await held if inspect.isawaitable(held) else held:
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(every)


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 30.0) -> None:
    """Wait in an event loop until ``condition`` holds; fail after ``seconds``."""
    held = await comes_true(condition, seconds)
    assert held, f"the condition did not come true within {seconds:g} s"


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, which does not keep the cancellation to itself."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return
    raise AssertionError("the task kept its cancellation to itself")


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until ``condition`` holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not come true within {seconds:g} s"
        time.sleep(_POLL_SECONDS)


def waiting_program(code: str, *arguments: object) -> tuple[subprocess.Popen[str], str]:
    """Start Python with ``code``, which prints a line and then reads its input; return it with the line."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()
