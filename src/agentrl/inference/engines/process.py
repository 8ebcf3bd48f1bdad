"""An engine's server as a child process: it dies with its parent, and its output goes to a log file."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from agentrl.errors import ConfigError, EngineError
from agentrl.inference.client import EngineClient

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_SECONDS = 0.25
_TAIL_LINES = 15
_MAX_PORT = 65535
# Runs the server and ends with its exit code. vLLM's workers outlive a server that is killed, so the kernel
# tells this shell when the parent is gone (SIGHUP), and it kills the whole process group, itself included.
_GUARD = """
trap 'kill -KILL 0' HUP
trap : TERM
"$@" &
while :; do
    wait $!; code=$?
    kill -0 $! 2>/dev/null || exit $code
done
"""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How a server is started; ``env`` is added to the environment.

    ``instance`` is the name that the started server, and no other, answers to ``EngineClient.instance``.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    instance: str | None = None


class EngineProcess:
    """A running server and everything that it started: one process group."""

    def __init__(self, command: EngineCommand, log_file: Path) -> None:
        """Start it. Call from the main thread: the server is killed when the thread that started it ends."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = log_file
        self.instance = command.instance
        with log_file.open("ab") as output:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "engine", *command.argv],
                env={**os.environ, **command.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_tell_when_parent_ends,
            )

    @property
    def pid(self) -> int:
        """The process group's id, which is its guard's process id too."""
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._child.poll()

    async def wait_ready(self, client: EngineClient, seconds: float) -> None:
        """Return once this server is healthy.

        EngineError where it ends first, another server answers in its place, or ``seconds`` are over.
        """
        deadline = time.monotonic() + seconds
        while True:
            healthy = await client.health()
            if self.returncode is not None:
                raise EngineError(
                    f"the engine ended with exit code {self.returncode} while starting:\n{self.log_tail()}",
                    hint=f"see {self.log_file}",
                )
            if healthy:
                await client.check_instance(self.instance)
                return
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine was not ready after {seconds:g} s (--engine_start_seconds)",
                    hint=f"see {self.log_file}",
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self, seconds: float = 10.0) -> None:
        """SIGTERM to the whole group, after ``seconds`` SIGKILL."""
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._child.wait, seconds)
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.to_thread(self._child.wait)

    def log_tail(self) -> str:
        """The last lines of the log."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def free_port(host: str) -> int:
    """Return a free port. Raises ConfigError if ``host`` is not an address of this machine."""
    return _bind(host, 0)


def require_free_port(host: str, port: int) -> None:
    """ConfigError unless an engine can listen on ``host:port`` now."""
    if not 1 <= port <= _MAX_PORT:
        raise ConfigError(f"--port is {port}", hint=f"use 1 to {_MAX_PORT}, or 0 for any free port")
    _bind(host, port)


def _bind(host: str, port: int) -> int:
    """Bind and release the address as servers bind it; returns the port."""
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
    """Say which process listens on ``port``, where the operating system tells this user."""
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections(kind="tcp"):
            listens = found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port
            if listens and found.pid is not None:
                return f" by process {found.pid} ({psutil.Process(found.pid).name()})"
    return " by another process"


def _tell_when_parent_ends() -> None:
    """In the child, before the guard: have the kernel tell it when the parent is gone.

    A shell cannot trap what it was started to ignore, as everything under nohup is started to ignore SIGHUP.
    """
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
