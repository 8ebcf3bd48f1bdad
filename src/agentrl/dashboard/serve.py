"""Make the dashboard's ASGI application and serve it: choose a port, make the token, end on a signal."""

from __future__ import annotations

import contextlib
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware

from agentrl.bounded_http import bind, serve_until_signal
from agentrl.concurrency import background
from agentrl.config.schema import RunConfig
from agentrl.dashboard import render, stores
from agentrl.dashboard.pages import all_routes
from agentrl.dashboard.query import HANDLERS
from agentrl.dashboard.security import DashboardOptions, Guard
from agentrl.dashboard.stores import LiveUpdates, StorePool
from agentrl.errors import AgentRLError, ConfigError
from agentrl.snapshot.snapshot import Cache


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
            f"--token_file {file} can be read by every user of this machine", hint=f"chmod 600 {file}"
        )
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {file} has {len(token)} characters, or some that are not ASCII",
            hint=f"use at least {_MIN_TOKEN}: (umask 077; openssl rand -hex 32 > {file})",
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
