"""Writes of one kind that are made at the same time become one: many trajectories, one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, Generic, TypeVar

from pymongo.errors import OperationFailure

Item = TypeVar("Item")
Result = TypeVar("Result")
_AT_ONCE = 64


class Combiner(Generic[Item, Result]):
    """Writes together what waits while a write is under way; a single item waits for nothing.

    ``together`` gives the results or errors of its items in order, or None where it cannot write all of them.
    Then, and where the server refuses the write, each item is written by ``alone`` and has the result or the
    error that it would have had by itself. So both must be such that repeating a write changes nothing.
    """

    def __init__(
        self,
        together: Callable[[Sequence[Item]], Coroutine[Any, Any, Sequence[Result | BaseException] | None]],
        alone: Callable[[Item], Coroutine[Any, Any, Result]],
    ) -> None:
        self._together = together
        self._alone = alone
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def write(self, item: Item) -> Result:
        """Write the item. A caller that is cancelled may find it written or not."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._writer is None:
            self._writer = asyncio.create_task(
                self._write_waiting(), name="agentrl-combined-writes", context=Context()
            )
        return await future

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
                items = [item for item, _ in batch]
                for (_, future), result in zip(batch, await self._results(items), strict=True):
                    if future.cancelled():
                        continue
                    if isinstance(result, BaseException):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
        finally:
            self._writer = None

    async def _results(self, items: list[Item]) -> Sequence[Result | BaseException]:
        if len(items) > 1:
            together = asyncio.create_task(self._together(items))
            await asyncio.wait([together])
            error = together.exception()
            if error is not None and not isinstance(error, OperationFailure):
                return [error] * len(items)
            results: Sequence[Result | BaseException] | None = (
                None if error is not None else together.result()
            )
            if results is not None:
                return results
        alone: list[Result | BaseException] = await asyncio.gather(
            *map(self._alone, items), return_exceptions=True
        )
        return alone
