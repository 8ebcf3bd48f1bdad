"""Run agentrl programs as forks of the process that has imported torch for all tests (``warm_python.py``).

A program has a process of its own, which may be killed; it starts in 0.1 s instead of the seconds that the
imports take. Tests of the command as a person enters it start Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from warm_python import warm_python

_THREADS = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
_START_SECONDS = 60.0


class Forked:
    """A program that may still run."""

    def __init__(self, link: socket.socket, log: Path) -> None:
        self._link = link
        self._read = b""
        self._code: int | None = None
        self.log = log
        started = self._number(_START_SECONDS)
        assert started is not None, "the program does not start"
        self.pid = started
        """Of the program."""

    @property
    def output(self) -> str:
        """What the program has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._exit_code(0.0) is None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> tuple[int, str]:
        """Return its exit code and its output. Raises TimeoutError after ``seconds``."""
        code = self._exit_code(seconds)
        if code is None:
            raise TimeoutError(f"it has not ended after {seconds:g} s:\n{self.output[-4000:]}")
        return code, self.output

    def _exit_code(self, seconds: float) -> int | None:
        if self._code is None:
            self._code = self._number(seconds)
        return self._code

    def _number(self, seconds: float) -> int | None:
        """Return the next number that its watcher says; None if there is none within ``seconds``."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._read:
            if not select.select([self._link], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            received = self._link.recv(64)
            assert received, "the watcher of a program has ended"
            self._read += received
        line, _, self._read = self._read.partition(b"\n")
        return int(line)


@contextlib.contextmanager
def forked(
    program: Sequence[str], arguments: Sequence[str], log: Path, **environment: str
) -> Iterator[Forked]:
    """Start ``-m MODULE`` or ``-c CODE`` with ``arguments``; kill it at the end of the block.

    ``log`` receives the output; the program finds ``environment`` in its own.
    """
    own = {**os.environ, **_THREADS, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    request = {"argv": [*program, *arguments], "cwd": os.getcwd(), "environ": own, "fds": [1, 2]}
    with socket.socket(socket.AF_UNIX) as link, log.open("wb") as output:
        link.connect(str(warm_python().parents[1] / "socket"))
        socket.send_fds(link, [b"."], [output.fileno(), output.fileno()])
        link.sendall(json.dumps(request).encode() + b"\n")
        process = Forked(link, log)
        try:
            yield process
        finally:
            if process.runs:
                process.signal(signal.SIGKILL)
                process.wait(10)


def run_forked(
    program: Sequence[str], arguments: Sequence[str], log: Path, seconds: float, **environment: str
) -> tuple[int, str]:
    """Run as ``forked`` does to the end; return the exit code and the output."""
    with forked(program, arguments, log, **environment) as process:
        return process.wait(seconds)
