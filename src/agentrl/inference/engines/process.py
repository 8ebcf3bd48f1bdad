"""An engine's server as a child process: it dies with its parent, and its output goes to a log file."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import EngineError
from agentrl.inference.engine import EngineClient

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_SECONDS = 0.25
_TAIL_LINES = 15
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
    """How a server is started; ``env`` is added to the environment."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class EngineProcess:
    """A running server and everything that it started: one process group."""

    def __init__(self, command: EngineCommand, log_file: Path) -> None:
        """Start it. Call from the main thread: the server is killed when the thread that started it ends."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = log_file
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
        """Return once the server is healthy; EngineError where it ends first or ``seconds`` are over."""
        deadline = time.monotonic() + seconds
        while not await client.health():
            if self.returncode is not None:
                raise EngineError(
                    f"the engine ended with exit code {self.returncode} while starting:\n{self.log_tail()}",
                    cure=f"see {self.log_file}",
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine was not ready after {seconds:g} s (--engine_start_seconds)",
                    cure=f"see {self.log_file}",
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
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _tell_when_parent_ends() -> None:
    """In the child, before the guard: have the kernel tell it when the parent is gone.

    A shell cannot trap what it was started to ignore, as everything under nohup is started to ignore SIGHUP.
    """
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
