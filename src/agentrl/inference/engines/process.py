"""Run the server of an engine as a child process, and check the port that it listens on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from agentrl.config.run import without_uri
from agentrl.errors import ConfigError, EngineError
from agentrl.inference.client import EngineClient
from agentrl.inference.control import load_seconds
from agentrl.inference.engines.commands import EngineCommand
from agentrl.processes import start_child, stop_child, tail

_POLL_SECONDS = 0.25
_MAX_PORT = 65535


class EngineProcess:
    """A running server and everything that it started: one process group, which ends with this process."""

    def __init__(self, command: EngineCommand, log_file: Path, pass_fds: Sequence[int] = ()) -> None:
        """Start it. Call this from the main thread: the server is killed when the calling thread ends.

        The file descriptors ``pass_fds`` stay open in it.
        """
        self.log_file = log_file
        self.instance = command.instance
        self._weights = command.weights
        self._child = start_child(
            command.argv, log=log_file, env={**without_uri(os.environ), **command.env}, is_guarded=True,
            pass_fds=pass_fds,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The id of the process group."""
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the server runs."""
        return self._child.poll()

    async def wait_ready(self, client: EngineClient, seconds: float) -> None:
        """Wait until the server is healthy.

        Raises EngineError if it ends first, if another server answers at its address, or after ``seconds``
        and the time that its weights may take to load.
        """
        seconds += await asyncio.to_thread(load_seconds, self._weights)
        deadline = time.monotonic() + seconds
        while True:
            healthy = await client.health()
            self._require_running(" while starting")
            if healthy:
                await client.check_instance(self.instance)
                return
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine was not ready after {seconds:.0f} s (--engine_start_seconds, and the time"
                    " that its weights take at 100 MB/s)",
                    hint=f"see {self.log_file}",
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self, seconds: float = 10.0) -> None:
        """Send SIGTERM to the process group, and SIGKILL to what is left of it after ``seconds``."""
        await asyncio.to_thread(stop_child, self._child, seconds)

    async def check(self, client: EngineClient) -> None:
        """Raise EngineError once the server has ended."""
        self._require_running()

    def _require_running(self, when: str = "") -> None:
        if self.returncode is not None:
            raise EngineError(
                f"the engine ended with exit code {self.returncode}{when}:\n{self.log_tail()}",
                hint=f"see {self.log_file}",
            )

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return tail(self.log_file)


def free_port(host: str) -> int:
    """Return a free port. Raises ConfigError if ``host`` is not an address of this machine."""
    return _bind(host, 0)


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError unless a server can listen on ``host:port`` now."""
    if not 1 <= port <= _MAX_PORT:
        raise ConfigError(f"--port is {port}", hint=f"use 1 to {_MAX_PORT}, or 0 for any free port")
    _bind(host, port)


def _bind(host: str, port: int) -> int:
    """Bind the address as servers do, release it, and return the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use{_listener(port)}",
                hint="end that process, or choose another --port (0: any free one)",
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"this user may not listen on port {port}", hint="choose a --port from 1024"
            ) from error
        raise ConfigError(
            f"--host {host} cannot be bound: {error.strerror or error}",
            hint="give an address of this machine, 127.0.0.1 or 0.0.0.0",
        ) from error


def _listener(port: int) -> str:
    """Return which process listens on ``port``, as far as the operating system shows it to this user."""
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections(kind="tcp"):
            listens = found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port
            if listens and found.pid is not None:
                return f" by process {found.pid} ({psutil.Process(found.pid).name()})"
    return " by another process"
