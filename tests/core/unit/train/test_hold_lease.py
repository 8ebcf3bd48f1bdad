"""A trainer's lease is renewed beside the block that holds it, and released when the renewal fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.train.lease import hold_lease


class Leases:
    """The lease of one trainer, whose renewal fails."""

    def __init__(self) -> None:
        self.released: list[int] = []

    async def acquire(self, *_: Any) -> int:
        return 7

    async def renew(self, attempt: int, seconds: float, doing: Any) -> None:
        raise ValueError("renewal")

    async def release(self, attempt: int, ended: Any) -> None:
        self.released.append(attempt)


async def test_the_failure_of_the_renewal_ends_the_block_and_releases_the_lease() -> None:
    leases = Leases()
    store: Any = SimpleNamespace(trainer_lease=leases)
    with pytest.raises(ValueError, match="renewal"):
        async with hold_lease(store, 0.03):
            await asyncio.sleep(10)
    assert leases.released == [7]
