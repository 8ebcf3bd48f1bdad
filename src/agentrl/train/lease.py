"""The trainer's lease on its run: taken at the start, renewed while it trains, given back at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agentrl.errors import LeaseLostError, StoreError
from agentrl.observe.logging import describe_process_id
from agentrl.store.outage import patient

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


class TrainerLease:
    """What makes this process the run's one trainer; made by ``hold``."""

    def __init__(self, store: Store, attempt: int, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self.attempt = attempt
        """Which start of a trainer on this run this is, from 1; writes under an earlier one are refused."""
        self.lost = asyncio.Event()
        """Set when another trainer has taken over."""

    async def check(self) -> None:
        """Renew now. Raises LeaseLostError if another trainer has taken over."""
        try:
            await self._store.runs.renew_trainer(self.attempt, self._seconds)
        except LeaseLostError:
            self.lost.set()
            raise

    async def keep(self) -> None:
        """Renew three times a term until the lease is lost; a database that is away is tried again."""
        while not self.lost.is_set():
            await asyncio.sleep(self._seconds / _RENEWALS_PER_LEASE)
            try:
                await self.check()
            except LeaseLostError as error:
                logger.error("%s", error.message)
            except StoreError as error:
                logger.warning("the trainer's lease could not be renewed: %s", error.message)


@asynccontextmanager
async def hold(store: Store, seconds: float) -> AsyncIterator[TrainerLease]:
    """Be the run's trainer for the length of the block.

    Raises StoreError, naming the holder, while another trainer's lease is alive.
    """
    attempt = await store.runs.acquire_trainer(
        describe_process_id(), socket.gethostname(), os.getpid(), seconds
    )
    lease = TrainerLease(store, attempt, seconds)
    keeper = asyncio.create_task(lease.keep(), name="trainer-lease")
    try:
        yield lease
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        with contextlib.suppress(StoreError), patient(0):
            await store.runs.release_trainer(attempt)
