"""Share what several readers need: one read at a time for a key, kept for some seconds."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar, cast

T = TypeVar("T")

MAX_ENTRIES = 256


class Cache:
    """Values by key. Callers that ask for a key while it is being read wait for the same read."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, tuple[float, object]] = OrderedDict()
        self._reads: dict[Hashable, asyncio.Task[object]] = {}

    async def get(
        self, key: Hashable, seconds: float, read: Callable[[], Awaitable[T]], *, stale: float = 0.0
    ) -> T:
        """Return the value of ``key``, read anew if it is older than ``seconds``. An error is not kept.

        A value that is older by up to ``stale`` seconds is returned at once, while it is read anew.
        """
        found = self._values.get(key)
        if found is not None and time.monotonic() - found[0] <= seconds:
            self._values.move_to_end(key)
            return cast("T", found[1])
        reading = self._reads.get(key)
        if reading is None:
            reading = asyncio.create_task(self._read(key, read), name="cached-read")
            self._reads[key] = reading
            reading.add_done_callback(_retrieve)
        if found is not None and time.monotonic() - found[0] <= seconds + stale:
            return cast("T", found[1])
        return cast("T", await asyncio.shield(reading))

    def peek(self, key: Hashable) -> object | None:
        """Return the value of ``key`` of any age; None without one."""
        found = self._values.get(key)
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget every value, after a change that all readers must see."""
        self._values.clear()

    async def close(self) -> None:
        """Cancel the reads that go on."""
        reads = list(self._reads.values())
        for reading in reads:
            reading.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    async def _read(self, key: Hashable, read: Callable[[], Awaitable[object]]) -> object:
        try:
            value = await read()
            self._values[key] = (time.monotonic(), value)
            self._values.move_to_end(key)
            while len(self._values) > MAX_ENTRIES:
                self._values.popitem(last=False)
            return value
        finally:
            self._reads.pop(key, None)


def _retrieve(reading: asyncio.Task[object]) -> None:
    """Mark the error of a read as seen: the next caller reads again, and gets it."""
    if not reading.cancelled():
        reading.exception()
