"""The renewal of a lease ends with its block."""

from __future__ import annotations

import asyncio

from agentrl.store.mechanics.lease import renewed


async def test_a_renewal_that_swallows_its_cancellation_ends_nevertheless() -> None:
    """As ``asyncio.wait_for`` of Python 3.11 does when what it awaits has just ended."""
    is_renewing = asyncio.Event()

    async def renew() -> None:
        is_renewing.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    async with asyncio.timeout(10), renewed(renew, 0.03, "the lease"):
        await is_renewing.wait()
