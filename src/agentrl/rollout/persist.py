"""Database operations that outlast a database that is away for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentrl.errors import LeaseLostError, StoreError

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 300.0
"""How long an operation is tried again before the sampler gives up."""

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 10.0

T = TypeVar("T")


async def persist(
    operation: Callable[[], Awaitable[T]],
    *,
    what: str,
    patience: float = PATIENCE_SECONDS,
    stop: asyncio.Event | None = None,
) -> T:
    """Call ``operation`` until it succeeds; what it is about to write stays in memory meanwhile.

    ``operation`` must be idempotent. A LeaseLostError is final; after ``patience`` seconds, or once ``stop``
    is set, the last StoreError is raised.
    """
    deadline = time.monotonic() + patience
    delay = _FIRST_DELAY
    while True:
        try:
            return await operation()
        except LeaseLostError:
            raise
        except StoreError as error:
            _raise_if_cancelled()
            if time.monotonic() + delay > deadline or (stop is not None and stop.is_set()):
                raise
            logger.warning("the database does not answer", extra={"for": what, "why": error.message})
        await _pause(delay, stop)
        delay = min(delay * 2, _LONGEST_DELAY)


def _raise_if_cancelled() -> None:
    """The driver may report a cancelled operation as a network error: the cancellation still counts."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _pause(seconds: float, stop: asyncio.Event | None) -> None:
    if stop is None:
        await asyncio.sleep(seconds)
        return
    waiting = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
    finally:
        waiting.cancel()
