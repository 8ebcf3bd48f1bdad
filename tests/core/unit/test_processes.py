"""Children run in a session of their own, and nothing of it survives a stop."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_until

from agentrl.base import processes
from agentrl.base.processes import (
    exit_reason,
    half_of_cores,
    run_child,
    start_child,
    start_ticks,
    stop_child,
    tail,
    user_name,
)

LEAVES_A_WORKER = """
import subprocess, sys
code = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "print('up', flush=True); time.sleep(60)"
)
worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_child_returns_its_exit_code_and_writes_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.out"
    code = "import sys; print('agentrl x: error: no model'); sys.exit(3)"
    assert run_child(python(code), log=log, env=dict(os.environ), seconds=60) == 3
    assert tail(log) == "agentrl x: error: no model"
    assert exit_reason(log) == "no model"


def test_a_child_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(subprocess.TimeoutExpired):
        run_child(python("import time; time.sleep(60)"), log=None, env=dict(os.environ), seconds=0.2)
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("is_guarded", [False, True])
def test_stopping_a_child_kills_what_it_left_behind(tmp_path: Path, is_guarded: bool) -> None:
    log = tmp_path / "child.out"
    child = start_child(python(LEAVES_A_WORKER), log=log, is_guarded=is_guarded)
    assert child.wait(60) == 0
    worker = int(tail(log))
    assert psutil.pid_exists(worker)
    stop_child(child, 5)
    wait_until(lambda: start_ticks(worker) is None)


@pytest.mark.parametrize(
    ("cpus", "smt", "limit", "threads"),
    [
        (2, "0", "max 100000", 1),
        (1, None, None, 1),
        (8, "1", "max 100000", 2),
        (8, "0", None, 4),
        (64, "1", "400000 100000", 2),
        (64, "1", "max 100000", 8),
    ],
)
def test_two_processes_share_the_cores(
    cpus: int, smt: str | None, limit: str | None, threads: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    for name, content in (("_TWO_A_CORE", smt), ("_CPU_LIMIT", limit)):
        monkeypatch.setattr(processes, name, tmp_path / name)
        if content is not None:
            (tmp_path / name).write_text(content)
    assert half_of_cores() == threads


def test_a_user_without_a_name_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_name() == getpass.getuser()

    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", no_name)
    assert user_name() == f"user {os.getuid()}"
