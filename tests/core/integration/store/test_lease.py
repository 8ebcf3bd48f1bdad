"""One suite for every lease (trainer, epoch, slot, request), and for the loop that renews them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any

import pytest
from made_documents import open_task

from agentrl.documents.record import GatewayCall
from agentrl.documents.run import EpochOpening
from agentrl.documents.task import Claim
from agentrl.errors import LeaseHeldError, LeaseLostError, StoreError, StoreUnavailableError
from agentrl.store.client import Store
from agentrl.store.epochs import EpochLeases
from agentrl.store.gateways import CallRequest
from agentrl.store.mechanics.lease import keep_renewed

LONG = 600.0


class Kind(ABC):
    """One kind of lease. What ``take`` returns is the holder's; None if another holds the lease."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @abstractmethod
    async def take(self, owner: str, seconds: float) -> Any: ...

    @abstractmethod
    async def renew(self, held: Any, seconds: float) -> None: ...

    @abstractmethod
    async def write(self, held: Any) -> None:
        """A write that only the holder may make."""

    @abstractmethod
    async def release(self, held: Any) -> None: ...


class OfTrainer(Kind):
    async def take(self, owner: str, seconds: float) -> int | None:
        try:
            return await self.store.trainer_lease.acquire(owner, "host", 1, seconds)
        except LeaseHeldError:
            return None

    async def renew(self, held: int, seconds: float) -> None:
        await self.store.trainer_lease.renew(held, seconds)

    async def write(self, held: int) -> None:
        await self.store.trainer_lease.discard_checkpoints(held, ["checkpoint-000001"])

    async def release(self, held: int) -> None:
        await self.store.trainer_lease.release(held)


class OfEpoch(Kind):
    def leases(self, owner: str, seconds: float = LONG) -> EpochLeases:
        leases = EpochLeases(self.store.connection)
        leases._owner, leases._seconds = owner, seconds
        return leases

    async def take(self, owner: str, seconds: float) -> EpochOpening | None:
        return await self.leases(owner, seconds).acquire(EpochOpening(id="train/0"))

    async def renew(self, held: EpochOpening, seconds: float) -> None:
        await self.leases(str(held.owner), seconds).renew(held)

    async def write(self, held: EpochOpening) -> None:
        await self.leases(str(held.owner)).renew(held, expected=7)

    async def release(self, held: EpochOpening) -> None:
        await self.leases(str(held.owner)).finish(held, 0)


class OfSlot(Kind):
    async def take(self, owner: str, seconds: float) -> Claim | None:
        if await self.store.epochs.count("train", 0) == 0:
            await self.store.tasks.load([open_task()])
        return await self.store.claims.claim(split="train", owner=owner, lease_seconds=seconds)

    async def renew(self, held: Claim, seconds: float) -> None:
        if await self.store.claims.heartbeat([held], seconds):
            raise LeaseLostError("the claim is lost")

    async def write(self, held: Claim) -> None:
        await self.store.records.create(held)

    async def release(self, held: Claim) -> None:
        await self.store.attempts.release(held)


class OfRequest(Kind):
    async def take(self, owner: str, seconds: float) -> GatewayCall | None:
        request = CallRequest(
            record="r", attempt=1, digest="d", dialect="chat", answer_id=owner, gateway=owner, has_key=True
        )
        call, is_mine = await self.store.gateways.begin(request, lease_seconds=seconds, retry_seconds=1.0)
        return call if is_mine else None

    async def renew(self, held: GatewayCall, seconds: float) -> None:
        await self.store.gateways.renew(held, seconds)

    async def write(self, held: GatewayCall) -> None:
        await self.store.gateways.renew(held, LONG)

    async def release(self, held: GatewayCall) -> None:
        await self.store.gateways.fail(held)


@pytest.fixture(params=[OfTrainer, OfEpoch, OfSlot, OfRequest])
def kind(request: pytest.FixtureRequest, store: Store) -> Kind:
    made: Kind = request.param(store)
    return made


pytestmark = pytest.mark.integration


async def test_of_eight_racers_one_takes_it(kind: Kind) -> None:
    if isinstance(kind, OfSlot):
        await kind.release(await kind.take("first", LONG))
    taken = await asyncio.gather(*(kind.take(f"racer-{number}", LONG) for number in range(8)))
    assert sum(held is not None for held in taken) == 1


async def test_a_lease_is_free_when_it_has_expired_and_its_holder_may_not_write(kind: Kind) -> None:
    first = await kind.take("first", LONG)
    assert await kind.take("second", LONG) is None
    await kind.write(first)
    await kind.renew(first, 0.0)
    second = await kind.take("second", LONG)
    assert second is not None
    with pytest.raises(LeaseLostError):
        await kind.write(first)
    with pytest.raises(LeaseLostError):
        await kind.renew(first, LONG)
    await kind.write(second)
    await kind.renew(second, LONG)


async def test_an_expired_lease_is_its_holders_until_another_takes_it(kind: Kind) -> None:
    first = await kind.take("first", 0.0)
    await kind.renew(first, LONG)
    assert await kind.take("second", LONG) is None
    await kind.write(first)


async def test_a_released_lease_is_free_at_once(kind: Kind) -> None:
    await kind.release(await kind.take("first", LONG))
    assert await kind.take("second", LONG) is not None


async def renewed(*errors: StoreError | None, outages: bool = True) -> int:
    """How often a lease is renewed whose renewals end so, and then in its loss."""
    left, count = list(errors), 0

    async def renew() -> None:
        nonlocal count
        count += 1
        error = left.pop(0) if left else LeaseLostError("another has it")
        if error is not None:
            raise error

    async with asyncio.timeout(10):
        await keep_renewed(renew, 0.0, "a lease", outages=outages)
    return count


async def test_a_lease_is_renewed_until_it_is_lost_also_after_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert await renewed(None, StoreError("full"), StoreUnavailableError("away"), None) == 5
    assert [record.getMessage() for record in caplog.records] == [
        "a lease could not be renewed: full", "a lease could not be renewed: away", "another has it",
    ]  # fmt: skip


async def test_an_outage_ends_the_renewals_that_have_waited_it_out(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoreUnavailableError):
        await renewed(None, StoreUnavailableError("away"), None, outages=False)
