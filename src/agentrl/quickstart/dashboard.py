"""Serve the dashboard while the quickstart runs."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.supervise import StoppedBySignalError, stop_on_signals

_PORTS = (*range(8900, 8920), 0)
"""The ports to try; 0 is any free one."""
_STOP_SECONDS = 5.0


@contextmanager
def dashboard(run_name: str, mongo_dir: str, log: Path) -> Iterator[str]:
    """Serve the dashboard during the block, and yield the login link of the run's page.

    The token reaches it by a pipe: arguments, environment, files and logs of this user are open to the run's
    harnesses.
    It answers a few seconds later. Training does not depend on it: if it ends, only ``log`` says so.
    """
    port, token = _free_port(), secrets.token_urlsafe(32)
    command = [
        sys.executable, "-m", "agentrl", "dashboard", "--mongo_dir", mongo_dir, "--port", str(port),
        "--token_file", "/dev/stdin",
    ]  # fmt: skip
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(token.encode())
    try:
        yield f"http://127.0.0.1:{port}/runs/{run_name}?token={token}"
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_signal() -> None:
    """Return at SIGINT, which Ctrl-C sends, or SIGTERM."""
    with contextlib.suppress(StoppedBySignalError), stop_on_signals():
        while True:
            signal.pause()


def _free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("port 0 is always free")
