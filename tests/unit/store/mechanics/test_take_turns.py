"""The bound of database calls that are under way at a time."""

from __future__ import annotations

import asyncio

from agentrl.store.mechanics.connection import Turns, context_with_turn


async def test_operations_wait_for_their_turn_and_nested_ones_do_not() -> None:
    turns, running, most = Turns(2), 0, 0

    async def nested() -> int:
        return 1

    async def operation() -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        result = await turns.take(nested)
        writer = asyncio.create_task(turns.take(nested), context=context_with_turn())
        result += await writer  # as a coalesced write, for which those with a turn wait
        running -= 1
        return result

    async with asyncio.timeout(5):
        results = await asyncio.gather(*(turns.take(operation) for _ in range(20)))
    assert (results, most) == ([2] * 20, 2)
