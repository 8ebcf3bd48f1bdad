"""Writes of one kind that are made at the same time become one: many trajectories, one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, Generic, TypeVar

from agentrl.store.driver_errors import is_outage

Item = TypeVar("Item")
Result = TypeVar("Result")
_AT_ONCE = 64


class WriteCoalescer(Generic[Item, Result]):
    """Writes together what waits while a write is under way; a single item waits for nothing.

    ``together`` gives the results or errors of its items in order, or None where it cannot write all of them.
    Then, and after every error but an outage, each item is written by ``alone``: one that cannot be encoded,
    or that the server refuses, has its own error, and the others are written. Both must be idempotent.
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
                await self._write_batch(batch)
        finally:
            self._writer = None

    async def _write_batch(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        """Write the batch and give every caller its result."""
        results: Sequence[Result | BaseException]
        try:
            try:
                results = await self._results([item for item, _ in batch])
            except Exception as error:  # noqa: BLE001  every caller receives it
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.cancelled():
                    continue
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)
        finally:
            for _, future in batch:
                if not future.done():
                    future.cancel()

    async def _results(self, items: list[Item]) -> Sequence[Result | BaseException]:
        if len(items) > 1:
            together = asyncio.create_task(self._together(items))
            await asyncio.wait([together])
            error = together.exception()
            if error is not None and is_outage(error):
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
