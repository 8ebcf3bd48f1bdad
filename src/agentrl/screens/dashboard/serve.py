"""Make the dashboard's ASGI application, check every request, and serve it until a signal."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.base.bounded_http import OwnHosts, bind, serve_until_signal
from agentrl.base.concurrency import background
from agentrl.config.schema import RunConfig
from agentrl.errors import AgentRLError, ConfigError, quoted
from agentrl.screens.dashboard import render, stores
from agentrl.screens.dashboard.pages import all_routes
from agentrl.screens.dashboard.query import HANDLERS
from agentrl.screens.dashboard.stores import LiveUpdates, StorePool
from agentrl.screens.snapshot import Cache


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
            return self._enter(request) if self._is_token(given) else _ask_for_token(request, given=True)
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(credentials.strip()):
            return None
        if _equal(request.cookies.get(self._options.cookie, ""), self._cookie_value()):
            return None
        # The page that asks for the token needs them, and every installation has the same ones.
        if request.scope["path"].startswith(f"{render.STATIC}/"):
            return None
        return _ask_for_token(request, given=bool(credentials))

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


def _ask_for_token(request: HTTPConnection, *, given: bool) -> Response:
    answer = render.render(request, "login.html", given=given, status=HTTPStatus.UNAUTHORIZED)
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def create_app(options: DashboardOptions) -> Starlette:
    """Return the application. It connects to MongoDB when it starts, and closes when it shuts down.

    ``app.state`` has its StorePool as ``stores``, its Cache as ``cache`` and its LiveUpdates as ``updates``.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with background(_connect(app.state.stores)):
            render.compile_templates()
            yield
        await app.state.updates.close()
        await app.state.cache.close()
        await app.state.stores.close()

    app = Starlette(
        routes=[*render.routes, *stores.routes, *all_routes()],
        middleware=[Middleware(Guard, options)],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.state.options = options
    app.state.cache = Cache()
    app.state.stores = StorePool(options.run)
    app.state.updates = LiveUpdates(app.state.stores)
    return app


async def _connect(stores: StorePool) -> None:
    """Connect before the first request. A request to a server that does not answer connects again."""
    with contextlib.suppress(AgentRLError):
        await stores.server()


DEFAULT_PORT = 8900
_PORTS_TRIED = 20
_TOKEN_BYTES = 32
_MIN_TOKEN = 16


async def serve(
    run: RunConfig,
    announce: Callable[[str], None],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    token_file: Path | None = None,
    hosts: tuple[str, ...] = (),
) -> None:
    """Serve until a signal. ``announce`` is called with the address, and the token if this process made it.

    ``port`` is by default 8900, or the next free one. ``token_file`` has the token; without one, only this
    process and its terminal have it. ``hosts`` are further names of this machine. Raises ConfigError for a
    port that is taken and a token file that cannot be used.
    """
    token = _token(token_file)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    cookie = f"agentrl_token_{port}"
    app = create_app(DashboardOptions(run=run, token=token, hosts=(*hosts, host), cookie=cookie))
    announce(_address(host, port, token if token_file is None else None))
    await serve_until_signal(app, listener, app.state.updates.stop)


def _address(host: str, port: int, token: str | None) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    where = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
    return where if token is None else f"{where}?token={token}"


def _token(file: Path | None) -> str:
    if file is None:
        return secrets.token_urlsafe(_TOKEN_BYTES)
    try:
        token = file.read_text(encoding="utf-8").strip()
        is_public = _is_public(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token_file {file} cannot be read: {error}",
            hint="write a token into it: (umask 077; openssl rand -hex 32 > FILE)",
        ) from error
    if is_public:
        raise ConfigError(
            f"--token_file {file} can be read by every user of this machine",
            hint=f"chmod 600 {quoted(file)}",
        )
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {file} has {len(token)} characters, or some that are not ASCII",
            hint=f"use at least {_MIN_TOKEN}: (umask 077; openssl rand -hex 32 > {quoted(file)})",
        )
    return token


def _is_public(file: Path) -> bool:
    """Return whether every user may read the file; a pipe (``/dev/stdin``) is nobody else's."""
    path = file.resolve()
    mode, folder = file.stat().st_mode, path.parent.stat().st_mode
    return stat.S_ISREG(mode) and bool(mode & stat.S_IROTH) and bool(folder & stat.S_IXOTH)


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket: on the port that was given, else on the first free one from 8900 on."""
    if port is not None:
        return bind(host, port, "the dashboard")
    for each in range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED):
        with contextlib.suppress(ConfigError):
            return bind(host, each, "the dashboard")
    return bind(host, 0, "the dashboard")
