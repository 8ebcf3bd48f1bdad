"""Keep this process's launcher running, and connect to it for each program."""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from agentrl.errors import ToolServerError
from agentrl.tools.sandbox.launcher import LENGTH_BYTES

_SOURCE: Final = str(Path(__file__).resolve().parents[3])
_STOP_SECONDS: Final = 5.0
_ATTEMPTS: Final = 2


class LauncherProcess:
    """A bare interpreter that forks a supervisor for each program; started at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> socket.socket:
        """Return a connection to a new supervisor. Starts the launcher again if it has died."""
        own, passed = socket.socketpair()
        try:
            with self._lock:
                self._pass(passed)
        except BaseException:
            own.close()
            raise
        finally:
            passed.close()
        return own

    def stop(self) -> None:
        """End the launcher; its supervisors end with their connections. Idempotent."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _pass(self, connection: socket.socket) -> None:
        for _ in range(_ATTEMPTS):
            control = self._control or self._start()
            try:
                socket.send_fds(control, [b"x"], [connection.fileno()])
            except OSError:
                self.stop()
                continue
            return
        raise ToolServerError("the sandbox's launcher does not start", hint="look for a lack of memory")

    def _start(self) -> socket.socket:
        own, passed = socket.socketpair()
        with contextlib.closing(passed):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", start_code("launcher")],
                stdin=passed.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
            )
        self._control = own
        return own


def start_code(module: str) -> str:
    """Return the code by which a bare interpreter (``-I -S``) runs ``main`` of a module of this package."""
    return (
        f"import sys; sys.path.insert(0, {_SOURCE!r});"
        f" from agentrl.tools.sandbox.{module} import main; main()"
    )


def encode_job(job: Mapping[str, Any]) -> bytes:
    """Return a job as the launcher reads it."""
    body = json.dumps(job).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


LAUNCHER: Final = LauncherProcess()
"""The launcher of this process."""

atexit.register(LAUNCHER.stop)
