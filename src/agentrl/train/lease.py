"""Hold the lease that makes this process the only trainer of its run: acquire, renew, release."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from agentrl.base.concurrency import background
from agentrl.base.processes import identify, is_observable
from agentrl.documents.run import Doing, SavedCheckpoint
from agentrl.documents.status import TrainerEnd, Work
from agentrl.documents.training import CheckpointState
from agentrl.errors import LeaseHeldError, LeaseLostError, StoreError
from agentrl.observe.logging import describe_process_id
from agentrl.store.mechanics.lease import RENEWALS_PER_LEASE, keep_renewed
from agentrl.store.mechanics.retry import retry_outages

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

BEAT_SECONDS = 5.0
"""Longest interval of heartbeats, which say what the trainer does."""
_POLL_SECONDS = 1.0
"""How often to try for a lease whose holder may have died."""


class HeldTrainerLease:
    """The lease of this process on its run; ``hold_lease`` acquires it."""

    def __init__(self, store: Store, attempt: int, seconds: float, owner: str = "trainer") -> None:
        self._store = store
        self._seconds = seconds
        self.owner = owner
        """A unique name of this process."""
        self.attempt = attempt
        """Counts the trainers of this run, from 1: a fencing token; writes with a smaller one are refused."""
        self.lost = asyncio.Event()
        """Set when another trainer has taken over."""
        self.ended: TrainerEnd | None = None
        """How the trainer ended, which ``hold_lease`` stores; None after an error."""
        self.doing = Doing(work=Work.STARTING)
        """What the trainer does, as each renewal says."""

    async def check(self) -> None:
        """Renew the lease. Raises LeaseLostError if another trainer has taken over."""
        await self._call(self._store.trainer_lease.renew(self.attempt, self._seconds, self.doing))

    async def discard(self, checkpoints: Sequence[str]) -> list[str]:
        """Record which of ``checkpoints`` are about to be deleted, and return them: no child needs them.

        Raises LeaseLostError if another trainer has taken over.
        """
        return await self._call(self._store.trainer_lease.discard_checkpoints(self.attempt, checkpoints))

    async def record_output(self, place: str) -> None:
        """Store where the run's output is. Raises LeaseLostError if another trainer has taken over."""
        await self._call(self._store.trainer_lease.record_output(self.attempt, place))

    async def record_saved(self, place: str, state: CheckpointState) -> None:
        """Store that the checkpoint at ``place`` is the newest one. Raises LeaseLostError as ``check``."""
        if state.train_steps:
            saved = SavedCheckpoint(place=place, step=state.train_steps[-1])
            await self._call(self._store.trainer_lease.record_saved(self.attempt, saved))

    async def go_back(self, step: int) -> None:
        """Withdraw the versions after ``step``, then revert the steps after it. Idempotent.

        In this order, no published version ever belongs to a reverted step. Raises LeaseLostError.
        """
        versions, steps = self._store.policy_versions, self._store.steps
        withdrawn = await self._call(versions.withdraw_after(step, attempt=self.attempt))
        if withdrawn:
            logger.info(
                "%d policy versions after step %d, or lost with a trainer, are withdrawn", withdrawn, step
            )
        reverted = await self._call(steps.revert_after(step, attempt=self.attempt))
        if reverted:
            logger.info("%d steps after step %d are reverted; their data are ready again", reverted, step)

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except LeaseLostError:
            self.lost.set()
            raise

    def fence(self) -> ThreadFence:
        """Return the lease's checks for a worker thread that writes files; call it on the event loop."""
        return ThreadFence(self, asyncio.get_running_loop())


@dataclass(frozen=True)
class ThreadFence:
    """The lease's checks for a worker thread; they run on the event loop, and block the thread.

    The timeouts of a database call bound each wait.
    """

    lease: HeldTrainerLease
    loop: asyncio.AbstractEventLoop

    def check(self) -> None:
        """Renew the lease. Raises LeaseLostError if another trainer has taken over."""
        asyncio.run_coroutine_threadsafe(self.lease.check(), self.loop).result()

    def discard(self, names: Sequence[str]) -> list[str]:
        """Call ``TrainerLease.discard``."""
        return asyncio.run_coroutine_threadsafe(self.lease.discard(names), self.loop).result()


@asynccontextmanager
async def hold_lease(
    store: Store, seconds: float, stop: asyncio.Event | None = None
) -> AsyncIterator[HeldTrainerLease]:
    """Hold the run's lease for the length of the block, and renew it meanwhile.

    If the holder cannot be observed from here (another machine or container), waits until its lease expires.
    Raises LeaseHeldError, naming the holder, if the holder is alive, or when ``stop`` is set.
    """
    owner = f"{describe_process_id()}-{secrets.token_hex(3)}"
    own = identify(os.getpid())
    attempt = await _until_free(
        store,
        lambda: store.trainer_lease.acquire(owner, socket.gethostname(), os.getpid(), seconds, own),
        stop or asyncio.Event(),
    )
    lease = HeldTrainerLease(store, attempt, seconds, owner)
    try:
        every = min(seconds / RENEWALS_PER_LEASE, BEAT_SECONDS)
        async with background(keep_renewed(lease.check, every, "the trainer's lease")):
            yield lease
    finally:
        # Wait for no database at the end: the lease expires by itself.
        with contextlib.suppress(StoreError), retry_outages(0):
            await store.trainer_lease.release(attempt, lease.ended)


async def require_no_trainer(store: Store) -> None:
    """Raise LeaseHeldError, naming the holder, if a trainer of this run is alive; waits as ``hold_lease``."""
    await _until_free(store, lambda: store.trainer_lease.require_free(socket.gethostname()), asyncio.Event())


async def _until_free(store: Store, call: Callable[[], Awaitable[T]], stop: asyncio.Event) -> T:
    """Call ``call`` until the lease is free; raise its LeaseHeldError if the holder is alive."""
    seen: tuple[int, datetime | None] | None = None
    while True:
        try:
            return await call()
        except LeaseHeldError as error:
            holder = await store.trainer_lease.read()
            term = (holder.attempt, holder.lease_expires_at)
            # Compare with the last look: a holder that cannot be seen from here shows its life by renewing.
            is_renewed = seen is not None and seen != term
            is_seen_alive = holder.process is not None and is_observable(holder.process)
            if stop.is_set() or (holder.owner is not None and (is_renewed or is_seen_alive)):
                raise
            if seen is None:
                logger.warning("%s; waiting until it is renewed or expires", error.message)
            seen = term
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_SECONDS)
