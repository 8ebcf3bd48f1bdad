"""Writes that come together: one batch, each with its own result or error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from pymongo.errors import AutoReconnect, OperationFailure

from agentrl.errors import StoreError
from agentrl.store.mechanics.connection import WriteCoalescer


class Writes:
    """Doubles numbers; negative ones are refused, and ``failure`` is what a batch raises."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.batches: list[int] = []
        self.failure = failure
        self.combiner = WriteCoalescer(self.together, self.alone)

    async def together(self, items: Sequence[int]) -> list[int] | None:
        self.batches.append(len(items))
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return None if min(items) < 0 else [2 * item for item in items]

    async def alone(self, item: int) -> int:
        self.batches.append(1)
        await asyncio.sleep(0)
        if item < 0:
            raise StoreError(f"{item} is refused")
        return 2 * item

    async def all(self, *items: int) -> list[int | BaseException]:
        return await asyncio.gather(*map(self.combiner.write, items), return_exceptions=True)


async def test_what_comes_together_is_written_together_in_order() -> None:
    writes = Writes()
    assert await writes.all(*range(100)) == [2 * number for number in range(100)]
    assert writes.batches == [64, 36]
    assert await writes.all(7) == [14]
    assert writes.batches == [64, 36, 1]


async def test_one_that_is_refused_fails_alone() -> None:
    first, refused, last = await Writes().all(1, -2, 3)
    assert (first, last) == (2, 6)
    assert isinstance(refused, StoreError)


async def test_what_the_server_refuses_together_is_written_one_by_one() -> None:
    writes = Writes(OperationFailure("a validator"))
    assert await writes.all(1, 2) == [2, 4]
    assert writes.batches == [2, 1, 1]


async def test_a_lost_server_is_everyones_error() -> None:
    results = await Writes(AutoReconnect("gone")).all(1, 2)
    assert [type(result) for result in results] == [AutoReconnect, AutoReconnect]


async def test_a_cancelled_caller_disturbs_no_other() -> None:
    writes = Writes()
    first, second = (asyncio.ensure_future(writes.combiner.write(number)) for number in (1, 2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 4
    with pytest.raises(asyncio.CancelledError):
        await first
