"""Check every request: content policy, Host header, token, and what other sites would write."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.config.schema import RunConfig
from agentrl.own_hosts import OwnHosts


@dataclass(frozen=True, kw_only=True)
class DashboardOptions:
    """Where the runs are, and who may look at them."""

    run: RunConfig
    """Its ``db_connection_string``, ``mongo_dir`` and ``db_timeout_seconds`` find the server; the name of its
    run is not used."""
    token: str | None = None
    """Every request must bring it, in a cookie, as ``?token=`` or as a bearer token; None asks for none."""
    hosts: tuple[str, ...] = ()
    """Names besides ``localhost`` and IP addresses that the Host header may have."""
    cookie: str = field(default="agentrl_token")
    """Name of the cookie; two dashboards of one host need two."""


FORM_FIELD: Final = "csrf"
_FORM_COOKIE: Final = "agentrl_csrf"
_SECRET = secrets.token_bytes(32)
"""A form that was loaded before the dashboard started is refused: load the page again."""
_MAX_FORM_COOKIE = 100
_FORM_BYTES = 64 * 1024
_FORM_SECONDS = 30.0
CONTENT_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_YEAR = 365 * 86400


class Guard:
    """ASGI middleware: refuses requests of other hosts and without the token, and sets the headers."""

    def __init__(self, app: ASGIApp, options: DashboardOptions) -> None:
        self._app = app
        self._options = options
        self._hosts = OwnHosts(*options.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        began = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Server-Timing"] = f"page;dur={1000 * (time.perf_counter() - began):.1f}"
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._refusal(HTTPConnection(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        host = request.headers.get("host", "")
        if not self._hosts.has(host):
            return PlainTextResponse(
                f"This dashboard does not answer to the host name {host[:100]!r}.\n"
                "Open it by its address, or start it with --allowed_hosts NAME.\n",
                HTTPStatus.MISDIRECTED_REQUEST,
            )
        if self._options.token is None:
            return None
        if given := request.query_params.get("token"):
            return self._enter(request) if self._is_token(given) else _ask_for_token()
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(credentials.strip()):
            return None
        cookie = request.cookies.get(self._options.cookie, "")
        return None if _equal(cookie, self._cookie_value()) else _ask_for_token()

    def _enter(self, request: HTTPConnection) -> Response:
        """Set the cookie, and go to the same address without the token."""
        rest = [(name, value) for name, value in parse_qsl(request.url.query) if name != "token"]
        path = "/" + request.url.path.lstrip("/")
        answer = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, HTTPStatus.SEE_OTHER)
        answer.set_cookie(
            self._options.cookie,
            self._cookie_value(),
            max_age=_YEAR,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _is_token(self, given: str) -> bool:
        return _equal(given, self._options.token or "")

    def _cookie_value(self) -> str:
        """Return the value of the cookie: a keyed hash, which does not reveal the token."""
        return hmac.new(
            (self._options.token or "").encode(), b"agentrl dashboard", hashlib.sha256
        ).hexdigest()


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _ask_for_token() -> Response:
    return PlainTextResponse(
        "This dashboard asks for its token.\nOpen the address that `agentrl dashboard` printed, which ends in"
        " ?token=…; a script sends it as `Authorization: Bearer …`.\n",
        HTTPStatus.UNAUTHORIZED,
        {"WWW-Authenticate": "Bearer"},
    )


def give_token(request: Request) -> tuple[str, str]:
    """Return the token for a form, and the cookie that it belongs to (``set_cookie`` sends it)."""
    cookie = request.cookies.get(_FORM_COOKIE, "")
    if not 0 < len(cookie) <= _MAX_FORM_COOKIE:
        cookie = secrets.token_urlsafe(32)
    return _form_token(cookie), cookie


def set_cookie(request: Request, response: Response, cookie: str) -> None:
    """Send the cookie with a page that has a form, and let the browser name the page's origin."""
    response.set_cookie(
        _FORM_COOKIE, cookie, httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    response.headers["Referrer-Policy"] = "same-origin"


async def posted_form(request: Request) -> dict[str, str]:
    """Return the fields of a posted form of this dashboard.

    Raises HTTPException 413 for a body above 64 KiB, 408 for one that takes longer than 30 seconds, 403 for a
    form of another site.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_FORM_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _FORM_BYTES:
                    raise HTTPException(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The form has more than {_FORM_BYTES:,} bytes."
                    )
    except TimeoutError:
        raise HTTPException(
            HTTPStatus.REQUEST_TIMEOUT, f"The form did not arrive within {_FORM_SECONDS:.0f} s."
        ) from None
    try:
        fields = parse_qs(body.decode("utf-8"), keep_blank_values=True, max_num_fields=20)
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "The form cannot be read.") from error
    form = {name: given[-1] for name, given in fields.items()}
    check_form(request, form.get(FORM_FIELD, ""))
    return form


def check_form(request: Request, given: str) -> None:
    """Raise HTTPException 403 unless the request comes from a form of this dashboard."""
    host = request.headers.get("host", "")
    same_host = bool(host) and urlsplit(request.headers.get("origin", "")).netloc == host
    same_site = request.headers.get("sec-fetch-site", "same-origin") == "same-origin"
    cookie = request.cookies.get(_FORM_COOKIE, "")
    same_token = bool(cookie) and hmac.compare_digest(given.encode(), _form_token(cookie).encode())
    if not (same_host and same_site and same_token):
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            "This does not come from a form of this dashboard, or the form is older than the dashboard: load"
            " its page again.",
        )


def _form_token(cookie: str) -> str:
    return hmac.new(_SECRET, cookie.encode(), hashlib.sha256).hexdigest()
