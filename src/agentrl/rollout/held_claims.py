"""Hold claims: work on each in a task of its own, renew their leases, release what is left at the end."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from agentrl.base.concurrency import end_tasks, wait_for_any
from agentrl.config.schema import ClaimConfig
from agentrl.documents.task import Claim
from agentrl.errors import StoreError
from agentrl.observe.logging import describe_process_id
from agentrl.store.mechanics.lease import keep_renewed
from agentrl.store.mechanics.retry import log_store_errors

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Time for the work on claims to finish after a stop signal."""

_CANCEL_SECONDS = 5.0
"""Time for cancelled tasks to end."""

RELEASE_SECONDS = 5.0
"""Time to release claims; after it their leases expire instead."""

ORPHANS_SECONDS = 3.0
"""Interval of looks for claims whose answer was lost, for one lease after an outage of the database."""


class HeldClaims:
    """The claims of one sampler or scorer, and the tasks that work on them."""

    def __init__(
        self,
        store: Store,
        config: ClaimConfig,
        owner: str,
        split: str,
        ended: Callable[[bool], None],
    ) -> None:
        """``ended`` is called with the result of the work on a claim when it ends, unless it is given up."""
        self._store = store
        self._owner = owner
        self._split = split
        self._orphans: frozenset[str] = frozenset()
        self._config = config
        self._on_end = ended
        self._running: dict[asyncio.Task[bool], Claim] = {}
        self._unusable: list[Claim] = []
        """Claims that this process cannot work on, because of its configuration or the database."""
        self.error: BaseException | None = None
        """The error of work on a claim, or of a job of ``renewing``."""
        self._due = 0.0
        """When the leases are renewed next, in ``time.monotonic``."""

    def __len__(self) -> int:
        return len(self._running)

    async def wait(self, *events: asyncio.Event, timeout: float) -> None:
        """Wait until the work on a claim ends, an event is set, or ``timeout`` seconds have passed."""
        await wait_for_any(*events, tasks=self._running, timeout=timeout)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Return the claims that are held."""
        return tuple(self._running.values())

    def start(self, claim: Claim, work: Coroutine[Any, Any, bool]) -> None:
        """Work on a claim in a task of its own."""
        task = asyncio.create_task(work, name=claim.record_id)
        self._running[task] = claim
        task.add_done_callback(self._ended)

    @asynccontextmanager
    async def renewing(self, *jobs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Renew the leases during the block, and run ``jobs`` beside it.

        A failure is kept as ``error``, which the block raises. It is not cancelled, unlike that of
        ``background``: it could lose a claim that is being granted.
        """

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self.error = task.exception()

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
        held = list(self._running.values())
        if held:
            lost = await self._store.claims.heartbeat(held, self._config.lease_seconds)
            self._give_up({claim.record_id for claim in lost})

    async def cancel(self, records: Collection[str]) -> list[Claim]:
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

    async def release(self, grace_seconds: float | None = None) -> bool:
        """Let the work finish for ``grace_seconds`` (``GRACE_SECONDS``), then cancel it; release all claims.

        Every part is bounded: if the database is unavailable, the leases expire instead. Returns whether the
        claims were released.
        """
        if self._running:
            grace = GRACE_SECONDS if grace_seconds is None else grace_seconds
            await asyncio.wait(list(self._running), timeout=grace)
        left = await self.cancel([claim.record_id for claim in self.claims])
        return await bounded(self._release([*left, *self._unusable]))

    async def _release_orphans(self) -> None:
        """Release claims that the database granted in an answer that an outage lost.

        An answer may still be on its way, so a claim is released when it is found for the second time.
        """
        held = {claim.record_id for claim in self._running.values()}
        mine = await self._store.claims.of_owner(self._split, self._owner)
        orphans = {claim.record_id: claim for claim in mine if claim.record_id not in held}
        await self._release([claim for key, claim in orphans.items() if key in self._orphans])
        self._orphans = frozenset(orphans)

    def _ended(self, task: asyncio.Task[bool]) -> None:
        claim = self._running.get(task)
        # Keep work that cancelled itself among the held, as at a stop: `release` hands its claim back.
        if task.cancelled() or claim is None:
            return
        del self._running[task]
        error = task.exception()
        if error is not None:
            self._unusable.append(claim)
            self.error = error
        self._on_end(error is None and task.result())

    def _give_up(self, lost: set[str]) -> None:
        for task, claim in list(self._running.items()):
            if claim.record_id in lost:
                logger.warning("the claim was lost; its work is given up", extra={"record": claim.record_id})
                # Forget the task before it ends: work that ignores the cancel must not report a result.
                self._running.pop(task)
                task.cancel()

    async def _release(self, claims: list[Claim]) -> None:
        if not claims:
            return
        try:
            lost = await self._store.attempts.release_all(claims)
        except StoreError as error:
            logger.warning(
                "claims could not be handed back; their leases run out",
                extra={"claims": len(claims), "why": error.message},
            )
            raise
        logger.info("claims handed back", extra={"claims": len(claims) - len(lost)})


def owner_name() -> str:
    """Return a unique, readable name of this process for claims."""
    return f"{describe_process_id()}-{uuid.uuid4().hex[:6]}"


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
