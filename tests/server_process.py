"""Start a server process and wait until it listens; end it and wait until it does not."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from waiting import wait_until

_START_SECONDS = 60.0
_END_SECONDS = 10.0


def listens(port: int) -> bool:
    """Return whether a server of this machine listens on ``port``."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_server(port: int, *words: str | Path) -> subprocess.Popen[bytes]:
    """Start a command, which listens on ``port``."""
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    wait_until(lambda: process.poll() is not None or listens(port), _START_SECONDS)
    assert process.poll() is None, "the server did not start"
    return process


def end_server(process: subprocess.Popen[bytes], port: int) -> None:
    """Kill the server; another one may listen on its port."""
    process.kill()
    process.wait(_END_SECONDS)
    wait_until(lambda: not listens(port), _END_SECONDS)
