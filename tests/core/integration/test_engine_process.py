"""An engine's process: its log, its failures to start, and that it never outlives its parent."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import psutil
import pytest
from waiting import wait_until

from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus
from agentrl.errors import ConfigError, EngineError
from agentrl.inference.client import EngineClient
from agentrl.inference.engines.commands import EngineCommand, EngineProcess, free_port, require_free_port
from agentrl.inference.session import EngineRouter

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
from agentrl.inference.engines.commands import EngineCommand
from agentrl.inference.engines.commands import EngineProcess
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
    wait_until(lambda: log.exists() and "\n" in log.read_text(encoding="utf-8"), 20)
    return log.read_text(encoding="utf-8").splitlines()[0]


def wait_gone(pid: int) -> None:
    wait_until(
        lambda: not (psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE), 10
    )


def test_output_goes_to_the_log_and_an_early_end_shows_it(tmp_path: Path, nobody: EngineClient) -> None:
    code = "import os, sys; print(os.environ['GREETING']); sys.exit('no such model')"
    process = EngineProcess(python(code), tmp_path / "logs" / "engine.log")
    with pytest.raises(EngineError, match="exit code 1") as caught:
        asyncio.run(process.wait_ready(nobody, 30.0))
    assert "no such model" in str(caught.value)
    assert "hello" in process.log_tail()


class Engine(BaseHTTPRequestHandler):
    """A healthy engine of another run; it remembers what it is asked."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"GET {self.path}")
        self.answer({"instance": "theirs", "model_path": "/models/theirs"})

    def do_POST(self) -> None:
        self.asked.append(f"POST {self.path}")
        self.answer({})

    def answer(self, content: dict[str, str]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def other() -> Iterator[str]:
    """The url of an engine that somebody else has started."""
    Engine.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


async def test_another_engine_at_the_address_is_not_adopted(tmp_path: Path, other: str) -> None:
    command = EngineCommand([sys.executable, "-c", "import time; time.sleep(600)"], instance="ours")
    process = EngineProcess(command, tmp_path / "engine.log")
    try:
        async with EngineClient(other) as client:
            with pytest.raises(EngineError, match=r"another server \(theirs\)"):
                await process.wait_ready(client, 30.0)
    finally:
        await process.stop()
    assert not [line for line in Engine.asked if line.startswith("POST")]


async def test_prompts_go_only_to_the_engine_that_registered(other: str) -> None:
    gone = InferenceService(
        id="gone", url=other, engine="local", model="m", host="h", pid=1, instance="ours",
        status=ServiceStatus.READY,
    )  # fmt: skip

    async def live() -> list[InferenceService]:
        return [gone]

    router = EngineRouter(live, wait_seconds=0.2, backoff=0.05, vocab_size=10)
    async with router.session("trajectory") as session:
        with pytest.raises(EngineError):
            await session.generate([1, 2], SamplingParams())
    await router.close()
    assert not [line for line in Engine.asked if line.startswith("POST")]


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 99999, "--port is 99999"),
        ("127.0.0.1", -1, "--port is -1"),
        ("203.0.113.1", 30000, "--host 203.0.113.1 cannot be bound"),
        ("no-such-host.invalid", 30000, "--host no-such-host.invalid cannot be bound"),
    ],
)
def test_an_address_that_no_server_can_have_is_refused(host: str, port: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_free_port(host, port)


@pytest.mark.parametrize("theirs", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_refused_with_the_process_that_has_it(theirs: str) -> None:
    with socket.socket() as server:
        server.bind((theirs, 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use by process {os.getpid()}"):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


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
