"""Coalesce concurrent writes of one kind, so that many trajectories share one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from agentrl.store.mechanics.connection import context_with_turn
from agentrl.store.mechanics.retry import is_outage

Item = TypeVar("Item")
Result = TypeVar("Result")
_MAX_BATCH = 64


class WriteCoalescer(Generic[Item, Result]):
    """Collects the items that arrive while a write is in flight and writes them as the next batch.

    An item that arrives while nothing is in flight is written at once. ``batched`` returns the results or
    errors of its items in order, or None if it cannot write them all. In that case, and after any error
    except an outage, ``single`` (or else ``batched``) writes each item alone: an item that cannot be encoded
    or that the server refuses gets an error of its own, and the others are written. Both functions must be
    idempotent.
    """

    def __init__(
        self,
        batched: Callable[[Sequence[Item]], Coroutine[Any, Any, Sequence[Result | BaseException] | None]],
        single: Callable[[Item], Coroutine[Any, Any, Result]] | None = None,
    ) -> None:
        self._batched = batched
        self._single = single
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def write(self, item: Item) -> Result:
        """Write the item and return its result. After a cancellation the item may be written or not."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._writer is None:
            # Write in an empty context: the transaction and retries of the first caller are its own.
            self._writer = asyncio.create_task(
                self._write_waiting(), name="agentrl-coalesced-writes", context=context_with_turn()
            )
        return await future

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
                await self._write_batch(batch)
        finally:
            self._writer = None

    async def _write_batch(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        """Write the batch and pass each caller its result or error."""
        results: Sequence[Result | BaseException]
        try:
            try:
                results = await self._results([item for item, _ in batch])
            except Exception as error:  # noqa: BLE001  every caller receives it
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                # Skip who has gone: its future refuses a result, and the callers behind would be cancelled.
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
            batched = asyncio.create_task(self._batched(items))
            await asyncio.wait([batched])
            error = batched.exception()
            if error is not None and is_outage(error):
                return [error] * len(items)
            results: Sequence[Result | BaseException] | None = None if error is not None else batched.result()
            if results is not None:
                return results
        alone: list[Result | BaseException] = await asyncio.gather(
            *map(self._write_alone, items), return_exceptions=True
        )
        return alone

    async def _write_alone(self, item: Item) -> Result:
        if self._single is not None:
            return await self._single(item)
        (result,) = await self._batched([item]) or ()
        if isinstance(result, BaseException):
            raise result
        return result
