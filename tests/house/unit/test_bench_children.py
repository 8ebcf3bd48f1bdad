"""A bench that is ended by a signal, or killed, leaves nothing running that it has started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from agentrl.base.processes import free_port, start_ticks

BENCH = Path(__file__).parents[3] / "scripts" / "bench"

PROGRAM = """
import sys, time
from contextlib import contextmanager
sys.path.insert(0, {bench!r})
import commands

class Mongo:
    def __init__(self, folder): self.uri = "mongodb://none"
    def up(self): return self
    def down(self): print("down", flush=True)

commands.EmbeddedMongo = Mongo
listen = "import socket, time; taken = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
words = [sys.executable, "-c", listen]
popen = commands.start_child
def start(*given, **named):
    process = popen(*given, **named)
    print(process.pid, flush=True)
    return process
commands.start_child = start
with commands.database(), commands.server(words, {port}):
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_of_a_bench_ends_with_it(number: int) -> None:
    program = PROGRAM.format(bench=str(BENCH), port=free_port())
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as bench:
        server = int(bench.stdout.readline())
        assert bench.stdout.readline() == "up\n"
        bench.send_signal(number)
        said = bench.stdout.read()
        assert bench.wait(30) == (128 + number if number == signal.SIGTERM else -number)
        assert said == ("down\n" if number == signal.SIGTERM else "")
        wait_until(lambda: start_ticks(server) is None)
