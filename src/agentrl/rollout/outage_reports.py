"""Store the outages that this process sees, so that ``agentrl audit run`` and the trainer's log show them."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from agentrl.errors import DATABASE, StoreError
from agentrl.observe.redact import redact_and_cut
from agentrl.rollout.breaker import Breaker
from agentrl.rollout.outages import Outages
from agentrl.store.mechanics.retry import log_store_errors

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

REPORT_SECONDS = 2.0
_END_SECONDS = 2.0
_WHY_CHARS = 500


async def report_outages(store: Store, outages: Outages, owner: str) -> None:
    """Store every ``REPORT_SECONDS`` which dependencies are down, until cancelled; then end them all.

    An outage of the database itself is stored when it is over.
    """
    reports = _Reports(store, owner)
    try:
        while True:
            with log_store_errors(logger, "outages could not be stored"):
                await reports.write([breaker for breaker in outages.open if not breaker.is_awaited])
            await asyncio.sleep(REPORT_SECONDS)
    finally:
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(_END_SECONDS):
                await reports.write([])


class _Reports:
    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._ongoing: dict[Breaker, tuple[str, float]] = {}
        """Breaker → id of the stored outage, and when it began (``time.monotonic``)."""
        self._count = 0

    async def write(self, down: list[Breaker]) -> None:
        """Store past outages of the database, refresh the outages that go on, and end the others."""
        for past in self._store.take_past_outages():
            self._count += 1
            await self._store.outages.add_past(
                f"{self._owner}/{self._count}",
                dependency=str(DATABASE),
                by=self._owner,
                why=redact_and_cut(past.why, _WHY_CHARS),
                ago=time.monotonic() - past.ended,
                seconds=past.ended - past.began,
            )
        for breaker, (outage_id, began) in list(self._ongoing.items()):
            if breaker not in down or breaker.down_since != began:
                await self._store.outages.end(outage_id)
                del self._ongoing[breaker]
        for breaker in down:
            if breaker.down_since is None:
                continue
            if breaker not in self._ongoing:
                self._count += 1
                self._ongoing[breaker] = f"{self._owner}/{self._count}", breaker.down_since
            await self._store.outages.refresh(
                self._ongoing[breaker][0],
                dependency=str(breaker.dependency),
                by=self._owner,
                why=redact_and_cut(breaker.why, _WHY_CHARS),
                held=breaker.held,
                seconds=time.monotonic() - breaker.down_since,
            )
