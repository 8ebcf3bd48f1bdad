"""Waiting for a database that is away: one policy for a process, one retry loop, one log line per outage."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from agentrl.errors import StoreAwayError, StoreError

logger = logging.getLogger(__name__)

R = TypeVar("R")

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 5.0
_STOPPING_SECONDS = 2.0
"""How long calls are still retried once the process is asked to stop."""

_REMINDER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Policy:
    seconds: float = 0.0
    stop: asyncio.Event | None = None


_IMPATIENT = _Policy()
_policy: ContextVar[_Policy] = ContextVar("agentrl_store_policy", default=_IMPATIENT)


@contextmanager
def patient(seconds: float, stop: asyncio.Event | None = None) -> Iterator[None]:
    """Retry each call in the block for up to ``seconds`` while the database is away (0: not at all).

    The policy covers tasks created in the block. Once ``stop`` is set, calls give up after two seconds.
    A call may run more than once, as its own documentation says.
    """
    token = _policy.set(_Policy(seconds, stop))
    try:
        yield
    finally:
        _policy.reset(token)


class OutageLog:
    """Logs when the database goes away, a reminder every minute, and when it is back; never once per call."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._next_line = 0.0
        self._announced = False

    def noticed(self, why: str, patience: float) -> None:
        """Record a call that failed because the database is away."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if now < self._next_line:
            return
        self._next_line = now + _REMINDER_SECONDS
        if self._announced:
            logger.warning("the database is still away after %.0f s: %s", now - self._began, why)
        else:
            self._announced = True
            logger.warning(
                "the database is away: %s; each call is trying again for up to %g s (--db_wait_seconds)",
                why, patience,
            )  # fmt: skip

    def over(self) -> None:
        """Record a call that succeeded."""
        if self._began is None:
            return
        if self._announced:
            logger.warning("the database is back after %.0f s", time.monotonic() - self._began)
        self._began, self._announced = None, False


async def retry_while_away(
    operation: Callable[[], Awaitable[R]], failure: Callable[[Exception], StoreError], log: OutageLog
) -> R:
    """Call ``operation`` until it succeeds or the patience of ``patient`` is used up.

    ``failure`` turns what it raised into a StoreError, or raises it again; only a StoreAwayError is retried.
    Delays have decorrelated jitter, so that processes do not return to a restarted server in step.
    """
    policy = _policy.get()
    deadline = time.monotonic() + policy.seconds
    delay, stopping = _FIRST_DELAY, False
    while True:
        try:
            result = await operation()
            raise_if_cancelled()
        except Exception as error:
            raise_if_cancelled()
            failed = failure(error)
            if policy.stop is not None and policy.stop.is_set() and not stopping:
                stopping = True
                deadline = min(deadline, time.monotonic() + _STOPPING_SECONDS)
            left = deadline - time.monotonic()
            if not isinstance(failed, StoreAwayError) or left <= 0:
                raise failed from error
        else:
            log.over()
            return result
        log.noticed(failed.message, policy.seconds)
        delay = min(_LONGEST_DELAY, random.uniform(_FIRST_DELAY, 3 * delay))
        await _pause(min(delay, left), None if stopping else policy.stop)


def raise_if_cancelled() -> None:
    """Raise CancelledError where this task has been cancelled.

    The driver may report a cancelled operation as a network error, or as done. A task that went on would not
    end, and the task that cancelled it would wait for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _pause(seconds: float, stop: asyncio.Event | None) -> None:
    """Sleep; less where ``stop`` is set meanwhile."""
    if stop is None:
        await asyncio.sleep(seconds)
        return
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([stopped], timeout=seconds)
    finally:
        stopped.cancel()
