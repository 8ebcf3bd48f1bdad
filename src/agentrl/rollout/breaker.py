"""Hold the calls that need a dependency while it is down, and let one probe it: a circuit breaker.

Open breakers are stored as outages, so that ``agentrl audit run`` and the trainer's log show them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from agentrl.errors import DATABASE, Dependency, StoreError
from agentrl.observe.redact import redact_and_cut
from agentrl.store.mechanics.retry import log_store_errors

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

OPEN_AFTER = 3
"""Consecutive failed calls, over all trajectories of the process, that open a breaker."""

FIRST_PROBE_SECONDS, LONGEST_PROBE_SECONDS = 1.0, 15.0
"""Wait before the first probe of a dependency that is down; each failed probe doubles it, up to the last."""

LONGEST_PAUSE_SECONDS = 3600.0
"""Longest wait that a dependency may ask for: it may be wrong, or mean harm."""

_PROBE_LIMIT_SECONDS = 120.0
"""Time after which a probe without a result no longer keeps others from probing."""

_REMINDER_SECONDS = 60.0
REPORT_SECONDS = 2.0
_END_SECONDS = 2.0
_WHY_CHARS = 500


class Breaker:
    """Opens after ``OPEN_AFTER`` consecutive failed calls. While it is open, one call at a time probes.

    The first successful call closes it and wakes all that wait. Probes go round among the waiting calls, so
    that a call which cannot succeed does not keep the others from finding the dependency up again.
    """

    def __init__(self, dependency: Dependency, changed: Callable[[], None]) -> None:
        """``changed`` is called when the breaker opens or closes, and when a probe is due."""
        self.dependency = dependency
        self.served = 0
        """Number of calls that succeeded."""
        self.down_since: float | None = None
        """When the breaker opened (``time.monotonic``); None while it is closed."""
        self.why = ""
        """The last error."""
        self.is_awaited = False
        """Whether it waits for the first start of the dependency. That is not reported as an outage."""
        self._changed = changed
        self._failures = 0
        self._delay = FIRST_PROBE_SECONDS
        self._probe_at = 0.0
        self._probing = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._remind_at = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether the dependency is down."""
        return self.down_since is not None

    @property
    def held(self) -> int:
        """Return how many calls wait for the dependency."""
        return len(self._waiting)

    @property
    def probe_is_due(self) -> bool:
        """Return whether new work may probe the dependency: it is time, and no call waits or probes."""
        return self.probe_due_for(0.0)

    def probe_due_for(self, seconds: float) -> bool:
        """Return whether ``probe_is_due`` has been true for ``seconds``."""
        is_free = self.is_open and not self._waiting and not self._probing
        return is_free and time.monotonic() >= self._probe_at + seconds

    def failed(self, why: str, retry_after: float | None = None) -> None:
        """Record a failed call. ``retry_after`` is the wait in seconds that the dependency asked for."""
        self.why = why
        self._failures += 1
        if self.is_awaited:
            self.is_awaited = False
            self._open(retry_after)
            return
        if self.down_since is None:
            if self._failures >= OPEN_AFTER:
                self._open(retry_after)
            return
        if self._probing:
            self._delay = min(2 * self._delay, LONGEST_PROBE_SECONDS)
            self._schedule_probe(retry_after)
        now = time.monotonic()
        if now >= self._remind_at:
            self._remind_at = now + _REMINDER_SECONDS
            logger.warning("%s: still down after %.0f s: %s", self.dependency, now - self.down_since, why)

    def went_down(self, why: str) -> None:
        """Open at once: the dependency is known to be down."""
        if self.down_since is None:
            self.why = why
            self._failures = OPEN_AFTER
            self._open(None)

    def not_up_yet(self) -> None:
        """Open without a warning: the dependency has not come up yet. A failed call makes it an outage."""
        if self.down_since is None:
            self.is_awaited, self.why = True, "it has not come up yet"
            self._open(None)

    def succeeded(self) -> None:
        """Record a successful call: the dependency is up."""
        self.served += 1
        self._failures = 0
        if self.down_since is None:
            return
        if not self.is_awaited:
            logger.warning("%s: up again after %.0f s", self.dependency, time.monotonic() - self.down_since)
        self.down_since, self.is_awaited = None, False
        self.close()
        self._changed()

    def begin_probe(self) -> None:
        """Let new work of the caller probe the dependency."""
        self._probing = True
        self._start_timer(_PROBE_LIMIT_SECONDS)

    async def wait(self) -> None:
        """Return when the dependency is up, or when it is this call's turn to probe it."""
        if not self.is_open:
            return
        probe_was_due = self.probe_is_due
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if probe_was_due:
            self._let_one_probe()
        try:
            await turn
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def close(self) -> None:
        """Wake all calls that wait, and stop the timer."""
        self._probing = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)

    def _open(self, retry_after: float | None) -> None:
        self.down_since = time.monotonic()
        self._remind_at = self.down_since + _REMINDER_SECONDS
        self._delay = FIRST_PROBE_SECONDS
        self._schedule_probe(retry_after)
        if not self.is_awaited:
            logger.warning(
                "%s: down; what needs it waits, and no attempt is used: %s", self.dependency, self.why
            )
        self._changed()

    def _schedule_probe(self, retry_after: float | None) -> None:
        self._probing = False
        seconds = min(max(self._delay, retry_after or 0.0), LONGEST_PAUSE_SECONDS)
        self._probe_at = time.monotonic() + seconds
        self._start_timer(seconds)

    def _start_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._let_one_probe)

    def _let_one_probe(self) -> None:
        """Wake the call that has waited longest; without one, let new work probe."""
        self._probing = False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self.begin_probe()
                turn.set_result(None)
                return
        self._changed()


async def report_outages(store: Store, breakers: Callable[[], list[Breaker]], owner: str) -> None:
    """Store every ``REPORT_SECONDS`` which ``breakers`` are open, until cancelled; then end all outages.

    An outage of the database itself is stored when it is over.
    """
    reports = _Reports(store, owner)
    try:
        while True:
            with log_store_errors(logger, "outages could not be stored"):
                await reports.write([breaker for breaker in breakers() if not breaker.is_awaited])
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
