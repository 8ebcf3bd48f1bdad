"""Bound the database calls of a process that are under way at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar
from typing import TypeVar

R = TypeVar("R")

_has_turn: ContextVar[bool] = ContextVar("agentrl_store_has_turn", default=False)


class Turns:
    """Lets at most ``limit`` operations run at a time; others wait in the order in which they came.

    The driver counts the wait for a free connection as time of an operation. Without a bound, a thousand
    calls at once therefore time out although the server answers all of them.
    """

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    async def take(
        self, operation: Callable[[], Awaitable[R]], check: Callable[[], Awaitable[None]] | None = None
    ) -> R:
        """Return what ``operation`` returns, in its turn, after ``check``.

        Operations inside it belong to the same turn.
        """
        if _has_turn.get():
            return await operation()
        async with self._free:
            token = _has_turn.set(True)
            try:
                if check is not None:
                    await check()
                return await operation()
            finally:
                _has_turn.reset(token)


def context_with_turn() -> Context:
    """Return an empty context for a task that works for operations which have their turns: it never waits."""
    context = Context()
    context.run(_has_turn.set, True)
    return context
