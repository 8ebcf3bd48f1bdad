"""Store the model calls of one trajectory in the background, so that the next model call does not wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

from agentrl.documents.task import Claim
from agentrl.rollout.model_call import PendingCall

if TYPE_CHECKING:
    from agentrl.store.client import Store

_INTERVAL_SECONDS = 0.05
"""Interval of the times at which all trajectories of the process write: their calls share a transaction.

A call waits for one to two intervals."""

_BUSY_SECONDS = 0.01
"""Delay of a timer from which on the process is busy: what the next model calls wait for comes first."""

_LONGEST_SECONDS = 1.0
"""Time after which calls are written also if the process is busy."""

_MANY_QUEUED = 12
"""Queued calls from which on they are written also if the process is busy."""

_MAX_QUEUED = 16
"""Calls that wait to be written; another one waits until they are fewer."""

_LAST_SECONDS = 1.0
"""Time to write what is queued after the trajectory was cancelled."""


class CallWriter:
    """Writes in order, while the process has nothing urgent to do, and nothing after an error.

    ``write`` and ``flush`` raise that error.

    An agent may suppress that error or raise another one; ``flush``, which comes before the score, raises the
    original. Use it as an async context manager.
    """

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self._queue: deque[PendingCall] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[None] | None = None
        self._written = asyncio.Event()
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._queue:
            return
        writer = self._start()
        await asyncio.wait([writer], timeout=_LAST_SECONDS)
        writer.cancel()

    async def write(self, call: PendingCall) -> None:
        """Queue one model call. Waits while too many are queued; raises the error of an earlier write."""
        self._check()
        self._queue.append(call)
        if self._writer is None and self._timer is None:
            self._wait_until_idle(time.monotonic() + _LONGEST_SECONDS)
        if len(self._queue) >= _MANY_QUEUED:
            self._start()
        while len(self._queue) > _MAX_QUEUED:
            self._start()
            self._written.clear()
            await self._written.wait()
        self._check()

    async def flush(self) -> None:
        """Wait until every queued call is stored. Raises the error of a write."""
        if self._queue:
            await asyncio.shield(self._start())
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait_until_idle(self, latest: float) -> None:
        """Start writing at one of the process's times, when it is not busy or ``latest`` has passed."""
        at = (time.monotonic() // _INTERVAL_SECONDS + 2) * _INTERVAL_SECONDS
        self._timer = asyncio.get_running_loop().call_later(
            at - time.monotonic(), self._start_if_idle, at, latest
        )

    def _start_if_idle(self, planned: float, latest: float) -> None:
        now = time.monotonic()
        if now < planned + _BUSY_SECONDS or now >= latest:
            self._start()
        else:
            self._wait_until_idle(latest)

    def _start(self) -> asyncio.Task[None]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writer is None:
            self._writer = asyncio.create_task(
                self._write_queued(), name=f"writer of {self._claim.record_id}"
            )
        return self._writer

    async def _write_queued(self) -> None:
        try:
            while self._queue:
                calls = [call.document() for call in self._queue]
                await self._store.model_calls.add(self._claim, *calls)
                for _ in calls:
                    self._queue.popleft()
                self._written.set()
        except Exception as error:  # noqa: BLE001  ``write`` and ``flush`` raise it
            self._error = error
            self._queue.clear()
        finally:
            self._writer = None
            self._written.set()
