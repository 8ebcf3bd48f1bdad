"""Child processes: started, restarted after a crash, ended with their parent, and identified."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_until, waiting_program

from agentrl.base import processes
from agentrl.base.processes import (
    MAX_RESTARTS,
    Ending,
    SupervisedProcess,
    Supervisor,
    exit_reason,
    half_of_cores,
    run_child,
    signal_session,
    start_child,
    start_ticks,
    stop_child,
    tail,
    user_name,
)
from agentrl.errors import AgentRLError, ConfigError, CostLimitError

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


def member(name, code, log=None, *arguments):
    return SupervisedProcess(name, [sys.executable, "-c", code, *map(str, arguments)], log, dict(os.environ))


def pid_in(file):
    wait_until(lambda: file.exists() and file.read_text())
    return int(file.read_text())


SLEEP = "import time; time.sleep(60)"
STARTS_A_CHILD = """
import subprocess, sys, time
from agentrl.base.processes import start_child
words = [sys.executable, "-c", "import time; time.sleep(60)"]
is_guarded = sys.argv[2:] == ["guarded"]
child = start_child(words, log=None) if is_guarded else subprocess.Popen(words, start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""
TELLS_WHEN_IT_STOPS = """
import signal, sys, time
order, name, delay, ready = sys.argv[1:]
def stop(*_):
    time.sleep(float(delay)); open(order, "a").write(f"{name} "); sys.exit()
signal.signal(signal.SIGTERM, stop)
open(ready, "w").close()
time.sleep(60)
"""
SUPERVISES = """
import sys, time
from agentrl.base.processes import StoppedBySignalError, SupervisedProcess, Supervisor, raise_on_signals
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
supervisor = Supervisor(print)
try:
    with raise_on_signals():
        try:
            main = SupervisedProcess("main", [sys.executable, "-c", code], None, {})
            supervisor.start(main)
            open(sys.argv[1], "w").write(str(main.process.pid))
            time.sleep(60)
        finally:
            open(sys.argv[2], "w").close()
            supervisor.stop(50)
except StoppedBySignalError as stopped:
    sys.exit(stopped.exit_code)
"""
STOPS_ON_SIGNALS = """
import asyncio
from agentrl.base.processes import stop_on_signals
async def main():
    at_once = asyncio.Event()
    stop = stop_on_signals(at_once)
    print("ready", flush=True)
    await stop.wait()
    print("stop, at once:", at_once.is_set(), flush=True)
    await at_once.wait()
    print("at once", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
FAR = float("inf")


@pytest.fixture
def supervisor(monkeypatch):
    monkeypatch.setattr(processes, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.5)
    supervisor = Supervisor()
    yield supervisor
    supervisor.stop(5)


def test_the_main_processes_exit_code_is_returned(supervisor):
    assert supervisor.run_main(member("main", "raise SystemExit(3)"), deadline=FAR) == 3


def test_at_the_deadline_the_main_process_is_asked_to_end(supervisor):
    code = "import signal,sys,time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(7)); time.sleep(60)"
    main = member("main", code)
    exit_code = supervisor.run_main(main, deadline=time.monotonic() + 3.0)
    assert exit_code == 7


def test_a_killed_helper_is_restarted(supervisor):
    helper = member("helper", SLEEP)
    supervisor.start(helper)
    first = helper.process.pid
    signal_session(helper.process, 9)
    helper.process.wait(10)
    supervisor.run_main(member("main", "import time; time.sleep(1)"), deadline=FAR)
    assert helper.restarts == 1
    assert helper.process.pid != first


def test_a_helper_that_keeps_crashing_ends_the_run_with_its_log(supervisor, tmp_path):
    supervisor.start(member("helper", "raise SystemExit('no luck today')", tmp_path / "helper.log"))
    with pytest.raises(AgentRLError, match=f"helper has ended {MAX_RESTARTS + 1} times") as error:
        supervisor.run_main(member("main", SLEEP), deadline=FAR)
    assert "no luck today" in str(error.value)


def test_a_wait_ends_with_its_event_its_time_or_a_helper_that_cannot_run(supervisor, tmp_path):
    came, never = threading.Event(), threading.Event()
    came.set()
    began = time.monotonic()
    supervisor.wait(came, 60.0)
    supervisor.wait(never, 0.1)
    assert time.monotonic() - began < 30
    supervisor.start(member("helper", f"raise SystemExit({ConfigError.exit_code})", tmp_path / "helper.log"))
    with pytest.raises(ConfigError, match="helper cannot run"):
        supervisor.wait(never, 60.0)


def test_helpers_run_until_all_have_ended(supervisor, tmp_path):
    code = f"import os, sys; path = {str(tmp_path / 'once')!r}\n" + (
        "if not os.path.exists(path):\n    open(path, 'w').close(); sys.exit(1)\n"
    )
    helper = member("helper", code, tmp_path / "helper.log")
    supervisor.start(helper)
    helper.process.wait(20)
    supervisor.run_helpers()
    assert helper.restarts == 1


def test_stop_ends_every_process(supervisor):
    helpers = [member(f"helper-{n}", SLEEP) for n in range(3)]
    for helper in helpers:
        supervisor.start(helper)
    supervisor.stop(5)
    assert all(helper.process.returncode is not None for helper in helpers)


def test_children_die_with_their_parent(tmp_path):
    """A child ends when its parent is killed."""
    starter = member("starter", STARTS_A_CHILD, None, tmp_path / "pid", "guarded")
    starter.start()
    child = pid_in(tmp_path / "pid")
    starter.process.kill()
    starter.process.wait(10)
    wait_until(lambda: is_gone(child))


def test_a_helper_that_ends_because_of_its_configuration_ends_the_run_with_its_reason(supervisor, tmp_path):
    code = "import sys; print('agentrl sample: error: no such model\\n  → give one'); sys.exit(2)"
    helper = member("helper", code, tmp_path / "helper.log")
    supervisor.start(helper)
    with pytest.raises(ConfigError, match="helper cannot run: no such model") as error:
        supervisor.run_main(member("main", SLEEP), deadline=FAR)
    assert "→ give one" in str(error.value)
    assert helper.restarts == 0


def test_stop_ends_processes_whose_parent_was_killed(supervisor, tmp_path):
    launcher = member("launcher", STARTS_A_CHILD, None, tmp_path / "pid")
    supervisor.start(launcher)
    child = pid_in(tmp_path / "pid")
    launcher.process.kill()
    launcher.process.wait(10)
    supervisor.stop(1)
    wait_until(lambda: is_gone(child))


def test_engines_and_tools_stop_after_the_processes_that_use_them(supervisor, tmp_path):
    order, ready = tmp_path / "order", [tmp_path / "engine.ready", tmp_path / "sampler.ready"]
    for file, delay, is_server in zip(ready, ("0", "0.5"), (True, False), strict=True):
        name = file.stem
        started = member(name, TELLS_WHEN_IT_STOPS, tmp_path / f"{name}.log", order, name, delay, file)
        started.is_server = is_server
        supervisor.start(started)
    wait_until(lambda: all(file.exists() for file in ready))
    supervisor.stop(20)
    assert order.read_text() == "sampler engine "


FINISHES_ITS_STEP = """
import signal, sys, time
saved, ready, seconds = sys.argv[1:]
def stop(*_):
    time.sleep(float(seconds)); open(saved, "w").close(); sys.exit()
signal.signal(signal.SIGTERM, stop)
open(ready, "w").close()
time.sleep(60)
"""
IGNORES_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("ending", "seconds", "saves", "told"),
    [
        (None, 30, False, []),
        (
            Ending(what="step 7 is saved", seconds=1.0, longest=10.0),
            3,
            True,
            ["about 1 s until", ", longer than before"],
        ),
        (Ending(what="step 7 is saved", seconds=0.1, longest=0.2), 30, False, ["longer than before"]),
        (Ending(what="step 7 is saved"), 2, True, ["at most 900 s"]),
    ],
)
def test_the_main_process_has_the_time_that_its_step_takes(
    monkeypatch, tmp_path, ending, seconds, saves, told
):
    """The others end as soon as without it. A line counts down, and says what a second Ctrl-C does."""
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.5)
    monkeypatch.setattr(processes, "_REPORT_SECONDS", 0.3)
    lines: list[str] = []
    supervisor = Supervisor(lines.append, lambda: ending)
    files = [tmp_path / name for name in ("saved", "main.ready", "helper.ready")]
    helper = member("helper", IGNORES_SIGTERM, tmp_path / "helper.log", files[2])
    supervisor.start(helper)

    def deadline() -> float:
        if all(file.exists() for file in files[1:]):
            raise InterruptedError  # as Ctrl-C does
        return FAR

    main = member("main", FINISHES_ITS_STEP, None, files[0], files[1], seconds)
    with pytest.raises(InterruptedError):
        supervisor.run_main(main, deadline=deadline)
    began = time.monotonic()
    supervisor.stop(0.1)
    assert time.monotonic() - began < 20
    assert (helper.pid, main.pid) == (None, None)
    assert files[0].exists() == saves
    assert [part for part in told if not any(part in line for line in lines)] == []
    assert all("step 7 is saved" in line and "Ctrl-C again ends at once" in line for line in lines)
    assert bool(lines) == bool(told)


def test_a_second_signal_kills_the_remaining_processes(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SUPERVISES, tmp_path / "ready", tmp_path / "stopping"])
    child = pid_in(tmp_path / "ready")
    process.terminate()
    wait_until((tmp_path / "stopping").exists)
    deadline = time.monotonic() + 30
    while not is_gone(child) and time.monotonic() < deadline:
        process.terminate()
        time.sleep(0.5)
    assert process.wait(10) == 143


def test_a_second_signal_ends_the_wait_and_a_third_the_process():
    process, line = waiting_program(STOPS_ON_SIGNALS)
    assert line == "ready"
    with process:
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            process.terminate()
            time.sleep(0.3)
        assert process.stdout.read().splitlines() == ["stop, at once: False", "at once"]
    assert process.returncode == -signal.SIGTERM


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_sampler_that_reached_the_cost_ends_the_run_with_its_own_exit_code(supervisor, tmp_path):
    code = "import sys; print('agentrl sample: error: the run has cost 51'); sys.exit(5)"
    helper = member("sampler-0", code, tmp_path / "helper.log")
    supervisor.start(helper)
    with pytest.raises(CostLimitError, match="sampler-0 ended: the run has cost 51") as error:
        supervisor.run_main(member("main", SLEEP), deadline=FAR)
    assert (error.value.exit_code, helper.restarts) == (5, 0)
