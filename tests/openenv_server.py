"""Run servers of OpenEnv in their own venv, and kill them: the example's robot, and one with MCP tools."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-openenv/bin/python"
ROBOT = ROOT / "assets/examples/openenv/server.py"
TOOLS = ROOT / "tests/openenv_tools.py"

needs_openenv = pytest.mark.skipif(not PYTHON.is_file(), reason="bash scripts/setup_openenv.sh")


class OpenEnvServer:
    """A server process on a port of its own; ``start`` after ``kill`` uses the same port."""

    def __init__(self, script: Path, *flags: str) -> None:
        self._command = [str(PYTHON), str(script), *flags]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        self._process = subprocess.Popen([*self._command, "--port", str(self.port)])
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline, "the server did not listen within 60 s"
            time.sleep(0.05)

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)


@contextmanager
def serving(script: Path, *flags: str) -> Iterator[OpenEnvServer]:
    """Run a server until the end of the block."""
    server = OpenEnvServer(script, *flags)
    server.start()
    try:
        yield server
    finally:
        server.kill()
