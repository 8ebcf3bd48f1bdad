"""Database writes that outlast a database that is away for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentrl.errors import LeaseLostError, StoreError

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 300.0
"""How long a write is tried again before the sampler gives up."""

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 10.0

T = TypeVar("T")


async def persist(write: Callable[[], Awaitable[T]], *, what: str, patience: float = PATIENCE_SECONDS) -> T:
    """Call ``write`` until it succeeds, for at most ``patience`` seconds; what it holds stays in memory.

    ``write`` must be idempotent. A LeaseLostError is final; after ``patience`` the last StoreError is raised.
    """
    deadline = time.monotonic() + patience
    delay = _FIRST_DELAY
    while True:
        try:
            return await write()
        except LeaseLostError:
            raise
        except StoreError as error:
            if time.monotonic() + delay > deadline:
                raise
            logger.warning(
                "the database did not take a write; trying again", extra={"what": what, "why": error.message}
            )
        await asyncio.sleep(delay)
        delay = min(delay * 2, _LONGEST_DELAY)
