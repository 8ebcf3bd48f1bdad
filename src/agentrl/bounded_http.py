"""Bound the connections of an HTTP server: clients that send no request are disconnected."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

logger = logging.getLogger(__name__)

HEADER_SECONDS = 15.0
"""Time for the header of a request to arrive."""
_LOG_SECONDS: Final = 60.0


def connection_limit() -> int:
    """Return the most connections of a server: half of the open files, the rest is for its own work."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is closed unless a request's header arrives in ``HEADER_SECONDS``.

    Beyond ``connection_limit`` the oldest connection without a request is closed for a new one.
    """

    _closed = 0
    _logged = -_LOG_SECONDS
    _expiry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > connection_limit():
            waiting = (each for each in self.connections if each._expiry is not None)
            min(waiting, key=lambda each: each._expiry.when(), default=self)._close("too many connections")

    def data_received(self, data: bytes) -> None:
        """Read; wait for the rest of a header."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._expiry is None and not self.transport.is_closing():
            self._expiry = self.loop.call_later(
                HEADER_SECONDS, self._close, f"no request in {HEADER_SECONDS:g} s"
            )

    def _stop_waiting(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _close(self, why: str) -> None:
        """Close the connection; log one line a minute for all of them."""
        self._stop_waiting()
        self.transport.abort()
        BoundedProtocol._closed += 1
        if time.monotonic() - BoundedProtocol._logged >= _LOG_SECONDS:
            logger.warning(
                "closed connections that sent no request",
                extra={"closed": BoundedProtocol._closed, "why": why, "open": len(self.connections)},
            )
            BoundedProtocol._logged, BoundedProtocol._closed = time.monotonic(), 0
