"""Refuse requests that a page of another site makes a browser send to a server of this machine."""

from __future__ import annotations

import ipaddress
import socket
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

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
