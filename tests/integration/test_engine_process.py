"""An engine's process: its log, its failures to start, and that it never outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentrl.errors import EngineError
from agentrl.inference.engine import EngineClient
from agentrl.inference.engines.process import EngineCommand, EngineProcess, free_port

pytestmark = pytest.mark.integration

SERVER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(worker.pid, flush=True)
time.sleep(600)
"""

PARENT = f"""
import subprocess, sys
from pathlib import Path
from agentrl.inference.engines.process import EngineCommand, EngineProcess
command = EngineCommand([sys.executable, "-c", {SERVER!r}])
process = EngineProcess(command, Path(sys.argv[1]))
print(process.pid, flush=True)
sys.stdin.read()
"""


def python(code: str) -> EngineCommand:
    return EngineCommand([sys.executable, "-c", code], {"GREETING": "hello"})


@pytest.fixture
def nobody() -> Iterator[EngineClient]:
    """A client of an address where nothing listens."""
    client = EngineClient(f"http://127.0.0.1:{free_port('127.0.0.1')}", 5.0)
    yield client
    asyncio.run(client.close())


def first_line(log: Path) -> str:
    deadline = time.monotonic() + 20
    while not log.exists() or "\n" not in log.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline, f"nothing was written to {log}"
        time.sleep(0.05)
    return log.read_text(encoding="utf-8").splitlines()[0]


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_output_goes_to_the_log_and_an_early_end_shows_it(tmp_path: Path, nobody: EngineClient) -> None:
    code = "import os, sys; print(os.environ['GREETING']); sys.exit('no such model')"
    process = EngineProcess(python(code), tmp_path / "logs" / "engine.log")
    with pytest.raises(EngineError, match="exit code 1") as caught:
        asyncio.run(process.wait_ready(nobody, 30.0))
    assert "no such model" in str(caught.value)
    assert "hello" in process.log_tail()


def test_a_server_that_is_never_ready_is_an_error(tmp_path: Path, nobody: EngineClient) -> None:
    process = EngineProcess(python("import time; time.sleep(600)"), tmp_path / "engine.log")
    with pytest.raises(EngineError, match="engine_start_seconds"):
        asyncio.run(process.wait_ready(nobody, 0.2))
    asyncio.run(process.stop())
    wait_gone(process.pid)


def test_stop_ends_a_server_that_ignores_sigterm_and_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = EngineProcess(python(code), tmp_path / "engine.log")
    child = int(first_line(tmp_path / "engine.log"))
    asyncio.run(process.stop(seconds=0.2))
    assert process.returncode == -signal.SIGKILL
    wait_gone(child)


@pytest.mark.parametrize("launcher", [[], ["nohup"]])
def test_a_server_and_its_workers_die_with_its_parent(tmp_path: Path, launcher: list[str]) -> None:
    parent = subprocess.Popen(
        [*launcher, sys.executable, "-c", PARENT, str(tmp_path / "engine.log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid = int(parent.stdout.readline())
    worker = int(first_line(tmp_path / "engine.log"))
    assert psutil.pid_exists(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    parent.stdin.close()
    parent.stdout.close()
    wait_gone(pid)
    wait_gone(worker)
