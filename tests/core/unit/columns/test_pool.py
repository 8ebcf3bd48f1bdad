"""A pool hands back what it cannot fill in; its last writes are bounded, and none of its errors is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from agentrl.columns import pool as pool_module
from agentrl.columns.pool import Pool, bounded
from agentrl.config.schema import ClaimConfig
from agentrl.errors import ConfigError, StoreError, StoreUnavailableError


@dataclass(frozen=True)
class Claim:
    record_id: str


@dataclass
class Fills:
    """A filler of the values ``waiting``; notes which are filled in and which are handed back."""

    waiting: list[str]
    work: Callable[[], Any] = lambda: asyncio.sleep(0)
    lost: list[str] = field(default_factory=list)
    """Whose lease others have taken over."""
    lost_claims: list[Claim] = field(default_factory=list)
    mine: list[str] = field(default_factory=list)
    """What the database has granted."""
    filled: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    async def claim(self, free: int) -> Sequence[Claim]:
        taken, self.waiting = self.waiting[:free], self.waiting[free:]
        return [Claim(name) for name in taken]

    async def fill(self, claim: Claim) -> bool:
        await self.work()
        self.filled.append(claim.record_id)
        return True

    async def is_done(self) -> bool:
        return True

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> Collection[Claim]:
        gone, self.lost_claims = self.lost_claims, []
        return [*gone, *(claim for claim in claims if claim.record_id in self.lost)]

    async def release(self, claims: Sequence[Claim]) -> Collection[Claim]:
        self.released += [claim.record_id for claim in claims]
        return []

    async def granted(self) -> Sequence[Claim]:
        return [Claim(name) for name in self.mine]


def pool_of(
    filler: Fills, *, lease_seconds: float = 60.0, drain_seconds: float = 0.01, outage: float = float("inf")
) -> Pool[Claim]:
    store: Any = SimpleNamespace(seconds_since_outage=outage)
    claims = ClaimConfig(lease_seconds=lease_seconds, drain_seconds=drain_seconds)
    return Pool(store, filler, claims, concurrency=2)


async def run(pool: Pool[Claim], stop: asyncio.Event | None = None, *jobs: Any) -> None:
    await asyncio.wait_for(pool.run(stop or asyncio.Event(), *jobs), 10)


async def fails(error: Exception) -> None:
    raise error


async def test_it_fills_in_all_that_waits_and_ends_when_its_filler_is_done() -> None:
    filler = Fills(list("abcde"))
    pool = pool_of(filler)
    await run(pool)
    assert (sorted(filler.filled), pool.filled, filler.released) == (list("abcde"), 5, [])


async def test_work_that_this_process_cannot_do_ends_it_and_is_handed_back() -> None:
    filler = Fills(["a"], lambda: fails(ConfigError("no such scorer")))
    with pytest.raises(ConfigError, match="no such scorer"):
        await run(pool_of(filler))
    assert filler.released == ["a"]


async def test_the_error_of_a_job_ends_it() -> None:
    filler = Fills(["a"], asyncio.Event().wait)
    with pytest.raises(StoreError, match="no changes"):
        await run(pool_of(filler), None, fails(StoreError("no changes")))
    assert filler.released == ["a"]


async def test_work_of_a_lost_claim_is_given_up_and_not_handed_back() -> None:
    filler = Fills(["a"], asyncio.Event().wait, lost=["a"])
    pool = pool_of(filler, lease_seconds=0.03)
    await run(pool)
    assert (pool.filled, filler.released) == (0, [])


async def test_a_claim_that_was_made_anew_outlives_the_loss_of_the_first() -> None:
    """After an outage longer than a lease, a pool may claim what it still works on."""
    filler, stop = Fills(["a", "a"], asyncio.Event().wait), asyncio.Event()
    pool = pool_of(filler, lease_seconds=0.03)
    running = asyncio.create_task(run(pool, stop))
    await until(lambda: len(pool) == 2)
    first, second = pool.claims
    filler.lost_claims = [first]
    await until(lambda: len(pool) == 1)
    assert pool.claims[0] is second
    stop.set()
    await running
    assert filler.released == ["a"]


async def test_work_that_a_cancel_ended_does_not_let_the_pool_claim_without_a_rest() -> None:
    """It is held until the other cancelled work has ended too, which may take seconds."""
    ends, looks = asyncio.Event(), 0

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if filler.waiting_for_end:
                filler.waiting_for_end = False
                await ends.wait()
            raise

    class Counting(Fills):
        waiting_for_end = True

        async def claim(self, free: int) -> Sequence[Claim]:
            nonlocal looks
            looks += 1
            return await super().claim(free)

    filler, stop = Counting(["a", "b"], slow_to_end), asyncio.Event()
    pool = Pool(pool_of(filler)._store, filler, ClaimConfig(lease_seconds=60.0), concurrency=3)
    running = asyncio.create_task(run(pool, stop))
    await until(lambda: len(pool) == 2)
    cancelling = asyncio.create_task(pool.cancel(["a", "b"]))
    before = looks
    await asyncio.sleep(0.2)
    assert looks <= before + 2
    ends.set()
    assert len(await cancelling) == 2
    stop.set()
    await running


async def test_a_pool_is_busy_until_its_last_work_ends() -> None:
    filler = Fills(["a"], lambda: asyncio.sleep(0.1))
    pool = pool_of(filler)
    began = time.monotonic()
    await run(pool)
    assert pool.busy_at >= began + 0.09


async def test_a_claim_whose_answer_an_outage_lost_is_handed_back_when_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "ORPHANS_SECONDS", 0.01)
    filler = Fills(["a"], asyncio.Event().wait, mine=["a", "b"])
    stop = asyncio.Event()
    running = asyncio.create_task(run(pool_of(filler, outage=0.0), stop))
    await until(lambda: "b" in filler.released)
    assert "a" not in filler.released
    stop.set()
    await running
    assert filler.released[-1] == "a"


@pytest.mark.parametrize("stops", [True, False])
async def test_an_outage_of_the_database_is_an_error_unless_the_pool_stops(stops: bool) -> None:
    stop = asyncio.Event()

    class Unreachable(Fills):
        async def claim(self, free: int) -> Sequence[Claim]:
            if stops:
                stop.set()
            raise StoreUnavailableError("the database is away")

    with nullcontext() if stops else pytest.raises(StoreUnavailableError):
        await run(pool_of(Unreachable([])), stop)


async def test_only_an_error_that_is_no_store_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert not await bounded(fails(StoreError("the caller has logged it")))
    assert caplog.records == []
    assert not await bounded(fails(ValueError("a defect")))
    assert "a defect" in caplog.text


async def test_a_database_that_does_not_answer_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "RELEASE_SECONDS", 0.01)
    assert not await bounded(asyncio.sleep(10))
    assert "does not answer" in caplog.text
    assert await bounded(asyncio.sleep(0))
