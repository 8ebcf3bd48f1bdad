"""The pool: claim what waits for a value, fill it in, renew the leases, hand back what is left at the end.

A trajectory is held by the same pool: its value is the score with which it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from agentrl.base.concurrency import Backoff, end_tasks, wait_for_any
from agentrl.base.processes import owned_name
from agentrl.config.schema import ClaimConfig
from agentrl.documents.task import Claim
from agentrl.errors import StoreError, StoreUnavailableError
from agentrl.store.mechanics.lease import keep_renewed
from agentrl.store.mechanics.retry import log_store_errors
from agentrl.store.services import SAMPLER_BEAT_SECONDS

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Largest number of claims that are made together."""

FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 2.0, 8.0
"""Interval of looks for what no change announces: a back-off that is over, a lease that expired.

It doubles with each look that finds nothing.
"""

_CANCEL_SECONDS = 5.0
"""Time for cancelled tasks to end."""

RELEASE_SECONDS = 5.0
"""Time to release claims; after it their leases expire instead."""

ORPHANS_SECONDS = 3.0
"""Interval of looks for claims whose answer was lost, for one lease after an outage of the database."""


class Leased(Protocol):
    """A claim: the right to fill in one value of a Record."""

    @property
    def record_id(self) -> str: ...


C = TypeVar("C", bound=Leased)


class Filler(Protocol[C]):
    """What a pool claims, how it is filled in, and how its leases are kept."""

    async def claim(self, free: int) -> Sequence[C]:
        """Claim up to ``free`` values that wait; none while what they need is down."""

    async def fill(self, claim: C) -> bool:
        """Store the value, or hand the claim back with a reason; return whether the value is stored.

        Raises the errors that end the process: a database that stays away, a task that it cannot work on.
        """

    async def is_done(self) -> bool:
        """Return whether the pool may end. It is asked when nothing is held and nothing was claimed."""

    async def renew(self, claims: Sequence[C], lease_seconds: float) -> Collection[C]:
        """Renew the leases of ``claims``; return those that others took over."""

    async def release(self, claims: Sequence[C]) -> Collection[C]:
        """Hand ``claims`` back unfilled, which uses up no attempt; return those that others took over."""

    async def granted(self) -> Sequence[C]:
        """Return the claims that this filler holds according to the database."""


class SlotLeases:
    """The leases of slots, for fillers that claim Tasks: those that sample and those that score."""

    def __init__(self, store: Store, split: str, owner: str) -> None:
        self.store = store
        self.split = split
        self.owner = owner

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> Collection[Claim]:
        """Renew the leases of ``claims``; return those that others took over."""
        return await self.store.claims.heartbeat(claims, lease_seconds)

    async def release(self, claims: Sequence[Claim]) -> Collection[Claim]:
        """Hand slots back: open, or, if the Record is sampled, waiting for its score."""
        return await self.store.attempts.release_all(claims)

    async def granted(self) -> Sequence[Claim]:
        """Return the claims that the owner holds according to the database."""
        return await self.store.claims.of_owner(self.split, self.owner)


class Pool(Generic[C]):
    """The claims of one filler, and the tasks that work on them."""

    def __init__(
        self, store: Store, filler: Filler[C], claims: ClaimConfig, concurrency: int, *, patience: float = 1.0
    ) -> None:
        """Hold up to ``concurrency`` claims at a time; look for work ``patience`` times as rarely."""
        self._store = store
        self._filler = filler
        self._config = claims
        self.concurrency = concurrency
        """May change; work that runs already goes on."""
        self._running: dict[asyncio.Task[bool], C] = {}
        self._unusable: list[C] = []
        """Claims that this process cannot work on, because of its configuration or the database."""
        self._orphans: frozenset[str] = frozenset()
        self._due = 0.0
        """When the leases are renewed next, in ``time.monotonic``."""
        self._woken = asyncio.Event()
        self._poll = Backoff("work", FIRST_POLL_SECONDS, patience * LONGEST_POLL_SECONDS)
        self.error: BaseException | None = None
        """The error of work on a claim, or of a job of ``renewing``."""
        self.filled = 0
        """Number of values that this pool filled in."""
        self.busy_at = 0.0
        """When something was held last, in ``time.monotonic``."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def claims(self) -> tuple[C, ...]:
        """Return the claims that are held."""
        return tuple(self._running.values())

    def wake(self) -> None:
        """Look for work now, and often for a while."""
        self._woken.set()

    async def run(
        self,
        stop: asyncio.Event,
        *jobs: Coroutine[Any, Any, None],
        at_once: asyncio.Event | None = None,
    ) -> None:
        """Fill until ``stop`` or until the filler is done, with ``jobs`` beside it; then hand back the rest.

        ``at_once`` is that of ``release``. Raises the error of work on a claim and of a job, after the claims
        are released.
        """
        async with self.renewing(*jobs):
            try:
                await self.work(stop)
            finally:
                await self.release(at_once)

    async def work(self, stop: asyncio.Event) -> None:
        """Claim and start work until ``stop`` or until the filler is done; end with claims still held."""
        self.busy_at = time.monotonic()
        try:
            while not stop.is_set():
                if self.error is not None:
                    raise self.error
                has_claimed = await self._claim_and_start()
                if self._running:
                    self.busy_at = time.monotonic()
                elif not has_claimed and await self._filler.is_done():
                    return
                if not has_claimed:
                    await self._wait(stop)
        except StoreUnavailableError:
            # End quietly: the same signal cuts the wait for an unavailable database to two seconds.
            if not stop.is_set():
                raise

    async def _claim_and_start(self) -> bool:
        free = self.concurrency - len(self._running)
        if free < 1:
            return False
        # Clear before the claim, not after it: a change that comes meanwhile must wake the next one.
        was_woken = self._woken.is_set()
        self._woken.clear()
        claims = await self._filler.claim(min(free, AT_ONCE))
        for claim in claims:
            task = asyncio.create_task(self._filler.fill(claim), name=claim.record_id)
            self._running[task] = claim
            task.add_done_callback(self._ended)
        if claims or was_woken:
            self._poll.reset()
        return bool(claims)

    async def _wait(self, stop: asyncio.Event) -> None:
        """Wait for ``stop``, ``wake``, the end of work, or the next look."""
        # Leave ``wake`` out while full: nothing claims and clears it, and each wait would end at once.
        events = [stop] if len(self._running) >= self.concurrency else [stop, self._woken]
        # Exclude cancelled tasks: they stay in the pool until ``cancel`` returns, and would end each wait.
        tasks = [task for task in self._running if not task.cancelled()]
        await wait_for_any(*events, tasks=tasks, timeout=self._poll.next())

    @asynccontextmanager
    async def renewing(self, *jobs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Renew the leases during the block, and run ``jobs`` beside it.

        A failure is kept as ``error``, which ``work`` raises. It is not cancelled, unlike that of
        ``background``: it could lose a claim that is being granted.
        """

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self.error = task.exception()
                self.wake()

        tasks = [asyncio.create_task(job) for job in (self._heartbeats(), *jobs)]
        for task in tasks:
            task.add_done_callback(ended)
        try:
            yield
        finally:
            await end_tasks(*tasks)

    async def _heartbeats(self) -> None:
        """Renew every lease; cancel the work on claims that others took over."""
        self._due = time.monotonic() + self._config.heartbeat_seconds
        every = min(self._config.heartbeat_seconds, ORPHANS_SECONDS)
        await keep_renewed(self._renew, every, "the leases of claims", outages=False)

    async def _renew(self) -> None:
        if self._store.seconds_since_outage < self._config.lease_seconds:
            with log_store_errors(logger, "claims could not be listed"):
                await self._release_orphans()
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._config.heartbeat_seconds
        if not self._running:
            return
        lost = await self._filler.renew(self.claims, self._config.lease_seconds)
        for task, claim in list(self._running.items()):
            # Compare claims, not Records: after an outage the pool may hold two claims on one Record.
            if any(claim is other for other in lost):
                logger.warning("the claim was lost; its work is given up", extra={"record": claim.record_id})
                # Forget the task before it ends: work that ignores the cancel must not report a result.
                self._running.pop(task)
                task.cancel()

    async def _release_orphans(self) -> None:
        """Release claims that the database granted in an answer that an outage lost.

        An answer may still be on its way, so a claim is released when it is found for the second time.
        """
        held = {claim.record_id for claim in self._running.values()}
        mine = await self._filler.granted()
        orphans = {claim.record_id: claim for claim in mine if claim.record_id not in held}
        await self._release([claim for key, claim in orphans.items() if key in self._orphans])
        self._orphans = frozenset(orphans)

    def _ended(self, task: asyncio.Task[bool]) -> None:
        claim = self._running.get(task)
        # Keep work that cancelled itself among the held, as at a stop: `release` hands its claim back.
        if task.cancelled() or claim is None:
            return
        del self._running[task]
        self.busy_at = time.monotonic()
        error = task.exception()
        if error is None:
            self.filled += task.result()
        else:
            self._unusable.append(claim)
            self.error = error
        self.wake()

    async def cancel(self, records: Collection[str]) -> list[C]:
        """Cancel the work on the claims of ``records``; return those whose work had not ended."""
        chosen = {task: claim for task, claim in self._running.items() if claim.record_id in records}
        for task in chosen:
            task.cancel()
        if chosen:
            await asyncio.wait(list(chosen), timeout=_CANCEL_SECONDS)
        # Leave out work that ended in spite of the cancel: that end has decided about its claim.
        cancelled = [claim for task, claim in chosen.items() if not task.done() or task.cancelled()]
        for task in chosen:
            self._running.pop(task, None)
        return cancelled

    async def release(self, at_once: asyncio.Event | None = None) -> bool:
        """Let work end for ``drain_seconds``, or until ``at_once``; then cancel it, and release all claims.

        The claim of work that cancels itself is released when it does. Every part is bounded: if the database
        is unavailable, the leases expire instead. Returns whether the claims were released.
        """
        left = await self._drain(at_once or asyncio.Event())
        left += await self.cancel([claim.record_id for claim in self.claims])
        return await bounded(self._release([*left, *self._unusable]))

    async def _drain(self, at_once: asyncio.Event) -> list[C]:
        """Wait for the end of all work; release what cancels itself. Return what could not be released."""
        failed: list[C] = []
        until = time.monotonic() + self._config.drain_seconds
        while True:
            stopped = [self._running.pop(task) for task in list(self._running) if task.cancelled()]
            if not await bounded(self._release(stopped)):
                failed += stopped
            unfinished = [task for task in self._running if not task.done()]
            seconds = until - time.monotonic()
            if not unfinished or seconds <= 0 or at_once.is_set():
                return failed
            await wait_for_any(at_once, tasks=unfinished, timeout=seconds)

    async def _release(self, claims: Sequence[C]) -> None:
        if not claims:
            return
        try:
            lost = await self._filler.release(claims)
        except StoreError as error:
            logger.warning(
                "claims could not be handed back; their leases run out",
                extra={"claims": len(claims), "why": error.message},
            )
            raise
        logger.info("claims handed back", extra={"claims": len(claims) - len(lost)})


OWNER_NAME = r"^(.+)-\d+[.-][0-9a-f.]+$"
"""What ``owner_name`` returns, for Python and MongoDB; the group is the host."""


def owner_name() -> str:
    """Return a unique name of this process for claims; it begins with ``host-pid``."""
    return owned_name(socket.gethostname().split(".")[0])


def host_of(owner: str) -> str | None:
    """Return the host of the process that ``owner_name`` named; None for another name."""
    found = re.search(OWNER_NAME, owner)
    return None if found is None else found[1]


async def count_gpus(store: Store, gpus: int) -> None:
    """Send heartbeats until cancelled, so that costs count the ``gpus`` on which this process computes."""
    owner, host, pid = owner_name(), socket.gethostname(), os.getpid()
    try:
        while True:
            with log_store_errors(logger, "the time of this process's GPUs is not counted", outages=True):
                await store.samplers.beat(owner, host=host, pid=pid, is_draining=False, gpus=gpus)
            await asyncio.sleep(SAMPLER_BEAT_SECONDS)
    finally:
        await bounded(store.samplers.end(owner))


async def bounded(work: Coroutine[Any, Any, None]) -> bool:
    """Await ``work`` for ``RELEASE_SECONDS``; return False if it failed or took longer."""
    task = asyncio.create_task(work)
    # Use wait: wait_for cancels at its time-out and then waits for the end, however long that takes.
    await asyncio.wait([task], timeout=RELEASE_SECONDS)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
        logger.warning("the database does not answer; leases that are still held run out")
        return False
    error = task.exception()
    if error is not None and not isinstance(error, StoreError):
        logger.error("leases could not be handed back; those that are still held run out", exc_info=error)
    return error is None
