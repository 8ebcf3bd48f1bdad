"""Limit the requests to one endpoint, and what a section may spend."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from agentrl.llm.agent_config import ModelEndpoint


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of ``Retry-After``: a number, or a date by the server's clock; None without one."""
    value = headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        sent = parsedate_to_datetime(headers["date"]).timestamp() if "date" in headers else time.time()
        return max(0.0, parsedate_to_datetime(value).timestamp() - sent)
    except (ValueError, TypeError):
        return None


_MINUTE = 60.0
_LONGEST_PAUSE_SECONDS = 3600.0
"""Longest pause that an endpoint may ask for: it may be wrong, or mean harm."""


@dataclass(slots=True)
class Use:
    """An amount used at a time; ``amount`` is an estimate until the reply reports the exact one."""

    at: float
    amount: int


class Window:
    """Keeps the sum of all amounts within any 60 seconds at or below ``limit``."""

    def __init__(self, limit: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._uses: deque[Use] = deque()

    def wait_seconds(self, amount: int) -> float:
        """Return how long to wait until ``amount`` fits; 0 if it fits now.

        An amount above the limit fits when nothing else is in the window.
        """
        if self._limit is None:
            return 0.0
        now = self._clock()
        while self._uses and self._uses[0].at <= now - _MINUTE:
            self._uses.popleft()
        excess = sum(use.amount for use in self._uses) + amount - self._limit
        for use in self._uses:
            if excess <= 0:
                break
            excess -= use.amount
            wait = use.at + _MINUTE - now
            if excess <= 0 or use is self._uses[-1]:
                return wait
        return 0.0

    def add(self, amount: int) -> Use:
        """Count ``amount`` from now on; change ``Use.amount`` when it is known exactly."""
        use = Use(self._clock(), amount)
        if self._limit is not None:
            self._uses.append(use)
        return use


class Limits:
    """The limits of one endpoint in one event loop."""

    def __init__(self, endpoint: ModelEndpoint) -> None:
        limit = endpoint.max_concurrency
        self._slots = asyncio.Semaphore(limit) if limit is not None else None
        self._requests = Window(endpoint.requests_per_minute)
        self._tokens = Window(endpoint.tokens_per_minute)
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    def pause(self, seconds: float) -> None:
        """Pause requests for ``seconds``, as the endpoint's Retry-After asks, and for an hour at most."""
        self._not_before = max(self._not_before, time.monotonic() + min(seconds, _LONGEST_PAUSE_SECONDS))

    def paused_seconds(self) -> float:
        """Return the seconds until the endpoint may be asked again."""
        return max(0.0, self._not_before - time.monotonic())

    async def acquire(self, tokens: int) -> Use:
        """Wait for a turn to send one request of about ``tokens``, first come, first served."""
        if self._slots is not None:
            await self._slots.acquire()
        try:
            return await self._admit(tokens)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End a request that ``acquire`` admitted."""
        if self._slots is not None:
            self._slots.release()

    async def _admit(self, tokens: int) -> Use:
        async with self._turn:
            while True:
                wait = max(self._requests.wait_seconds(1), self._tokens.wait_seconds(tokens))
                if wait <= 0:
                    self._requests.add(1)
                    return self._tokens.add(tokens)
                await asyncio.sleep(wait)


@dataclass(slots=True)
class Budget:
    """What this process has spent on one section, and may spend."""

    limit: float | None = None
    spent: float = 0.0

    @property
    def is_used_up(self) -> bool:
        """Return whether the limit is reached."""
        return self.limit is not None and self.spent >= self.limit
