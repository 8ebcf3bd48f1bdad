"""Serve the dashboard: choose a port, make the token, end at once on SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from agentrl.bounded_http import BoundedProtocol
from agentrl.config.schema import RunConfig
from agentrl.dashboard.app import create_app
from agentrl.dashboard.options import DashboardOptions
from agentrl.errors import ConfigError

DEFAULT_PORT = 8900
_PORTS_TRIED = 20
_TOKEN_BYTES = 32
_MIN_TOKEN = 16
_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where the dashboard listens, and how it lets people in."""

    run: RunConfig
    host: str = "127.0.0.1"
    port: int | None = None
    """None: 8900, or the next free one."""
    token_file: Path | None = None
    """File with the token; None makes one, which only this process and its terminal have."""
    hosts: tuple[str, ...] = ()


class _Server(uvicorn.Server):
    """A server that ends the event streams as soon as it is asked to stop."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then the server."""
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


async def serve(config: ServeConfig, announce: Callable[[str], None]) -> None:
    """Serve until a signal. ``announce`` is called with the address, and the token if this process made it.

    Raises ConfigError for a port that is taken and a token file that cannot be used.
    """
    token = _token(config)
    listener = _listen(config)
    port = listener.getsockname()[1]
    app = create_app(
        DashboardOptions(
            run=config.run,
            token=token,
            hosts=(*config.hosts, config.host),
            cookie=f"agentrl_token_{port}",
        )
    )
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=30,
            http=BoundedProtocol,
        ),
        app.state.updates.stop,
    )
    announce(_address(config.host, port, token if config.token_file is None else None))
    await server.serve([listener])


def _address(host: str, port: int, token: str | None) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    where = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
    return where if token is None else f"{where}?token={token}"


def _token(config: ServeConfig) -> str:
    file = config.token_file
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


def _listen(config: ServeConfig) -> socket.socket:
    """Return a listening socket: on the port that was given, else on the first free one from 8900 on."""
    if config.port is not None:
        return _bind(config.host, config.port)
    for port in range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED):
        with contextlib.suppress(ConfigError):
            return _bind(config.host, port)
    return _bind(config.host, 0)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the dashboard cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another --port, leave it out for a free one, or give an address of this machine as"
            " --host",
        ) from error
    return listener
