"""Serve HTTP until a signal: with bounded connections, and not to pages of other sites."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from agentrl.errors import ConfigError

_LOOPBACKS: Final = {"127.0.0.1", "::1"}


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class OwnHosts:
    """The names of this machine: ``localhost``, its host name, every IP address, and ``more``.

    A page of another site reaches a server that only listens on the loopback in two ways. It sends a request
    there, which has the page's Origin. Or the site's own name resolves to the loopback address (DNS
    rebinding), and the request has that name as its Host; an IP address cannot be such a name.
    """

    def __init__(self, *more: str) -> None:
        own = socket.gethostname()
        self._names = {name.lower() for name in ("localhost", own, own.split(".")[0], *more) if name}

    def has(self, host: str) -> bool:
        """Return whether a Host header, with or without a port, names this machine."""
        name = _name_of(host)
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def problem(self, headers: Headers) -> str | None:
        """Return why a request comes from another site; None for our own and for programs."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.has(host):
            return f"this server does not answer to the host name {host[:100]!r}"
        try:
            site = urlsplit(origin or "").netloc
        except ValueError:  # as of "http://[": no site of ours
            site = ""
        if origin is not None and site != host and _name_of(site) not in self._names | _LOOPBACKS:
            return f"this server does not answer to pages of {origin[:100]!r}"
        return None


def _name_of(host: str) -> str:
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    return name.lower().rstrip(".").strip("[]")


class OwnHostsOnly:
    """ASGI middleware that answers 421 to requests of other sites (``OwnHosts``)."""

    def __init__(self, app: ASGIApp, hosts: OwnHosts, hint: str) -> None:
        """``hint`` says how a name is allowed."""
        self._app, self._hosts, self._hint = app, hosts, hint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        problem = self._hosts.problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        error = {
            "message": f"{problem} ({self._hint})", "type": "invalid_request_error", "param": None,
            "code": "foreign_site",
        }  # fmt: skip
        await JSONResponse({"error": error}, HTTPStatus.MISDIRECTED_REQUEST)(scope, receive, send)


def for_own_hosts(
    app: ASGIApp, host: str, *more: str, hint: str = "ask it by its IP address or as localhost"
) -> ASGIApp:
    """Return the application of a server that listens on ``host``: on a loopback, behind ``OwnHostsOnly``.

    Elsewhere its names are not known, and it needs a key.
    """
    return OwnHostsOnly(app, OwnHosts(*more), hint) if is_loopback(host) else app


logger = logging.getLogger(__name__)

HEADER_SECONDS = 15.0
"""Time for the header of a request to arrive."""
_LOG_SECONDS: Final = 60.0
_BACKLOG: Final = 2048


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


_BIND_HINT: Final = (
    "choose another --port, leave it out for a free one, or give an address of this machine as --host"
)


def bind(host: str, port: int, what: str, hint: str = _BIND_HINT) -> socket.socket:
    """Return a listening socket for ``what``; port 0 is any free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once (TCP_NODELAY) only on sockets that name the protocol
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{what} cannot listen on {host}:{port}: {error.strerror or error}", hint=hint
        ) from error
    return listener


def server_config(app: Any) -> uvicorn.Config:
    """Return the configuration of a server with bounded connections for an ASGI application."""
    return uvicorn.Config(
        app,
        log_config=None,  # its default closes the handlers of this process: later log records would be lost
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=30,
        http=BoundedProtocol,
    )


async def serve_until_signal(app: Any, listener: socket.socket, stop: Callable[[], None]) -> None:
    """Serve an ASGI application until SIGINT or SIGTERM; ``stop`` is called before it shuts down."""
    await _Server(server_config(app), stop).serve([listener])


class _Server(uvicorn.Server):
    """A server that calls ``stop`` as soon as it is asked to stop."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Call ``stop``, then end the server."""
        self._stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT and SIGTERM; the process exits with 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
