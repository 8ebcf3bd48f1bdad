"""Serve the dashboard: choose a port, make the token, end at once on SIGINT and SIGTERM."""

from __future__ import annotations

import contextlib
import secrets
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.bounded_http import bind, serve_until_signal
from agentrl.config.schema import RunConfig
from agentrl.dashboard.app import create_app
from agentrl.dashboard.options import DashboardOptions
from agentrl.errors import ConfigError

DEFAULT_PORT = 8900
_PORTS_TRIED = 20
_TOKEN_BYTES = 32
_MIN_TOKEN = 16


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
    announce(_address(config.host, port, token if config.token_file is None else None))
    await serve_until_signal(app, listener, app.state.updates.stop)


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
        return bind(config.host, config.port, "the dashboard")
    for port in range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED):
        with contextlib.suppress(ConfigError):
            return bind(config.host, port, "the dashboard")
    return bind(config.host, 0, "the dashboard")
