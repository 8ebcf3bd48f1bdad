"""The supervisor starts, restarts and stops real child processes."""

import os
import subprocess
import sys
import threading
import time

import pytest
from waiting import wait_until

from agentrl import supervise
from agentrl.errors import AgentRLError, ConfigError
from agentrl.processes import signal_session
from agentrl.supervise import MAX_RESTARTS, SupervisedProcess, Supervisor


def member(name, code, log=None):
    return SupervisedProcess(name, [sys.executable, "-c", code], log, dict(os.environ))


SLEEP = "import time; time.sleep(60)"
FAR = float("inf")


@pytest.fixture
def supervisor(monkeypatch):
    monkeypatch.setattr(supervise, "_FIRST_DELAY", 0.01)
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
    script = (
        "import sys, time\n"
        "from agentrl.processes import start_child\n"
        "child = start_child([sys.executable, '-c', 'import time; time.sleep(60)'], log=None)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    starter = member("starter", script)
    starter.start()
    pid_file = tmp_path / "pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    starter.process.kill()
    starter.process.wait(10)
    child = int(pid_file.read_text())

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
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    launcher = member("launcher", code)
    supervisor.start(launcher)
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    launcher.process.kill()
    launcher.process.wait(10)
    supervisor.stop(1)
    wait_until(lambda: is_gone(int(pid_file.read_text())))


def test_engines_and_tools_stop_after_the_processes_that_use_them(supervisor, tmp_path):
    log = tmp_path / "order"
    tell = (
        "import signal, sys, time\n"
        "def stop(*_):\n"
        f"    time.sleep(float(sys.argv[2])); open({str(log)!r}, 'a').write(sys.argv[1]); sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open(sys.argv[3], 'w').close()\n"
        "time.sleep(60)\n"
    )
    for name, delay, is_server in (("engine", "0", True), ("sampler", "0.5", False)):
        started = member(name, tell, tmp_path / f"{name}.log")
        started.command += [f"{name} ", delay, str(tmp_path / f"{name}.ready")]
        started.is_server = is_server
        supervisor.start(started)
    wait_until(lambda: all((tmp_path / f"{name}.ready").exists() for name in ("engine", "sampler")))
    supervisor.stop(20)
    assert log.read_text() == "sampler engine "


def test_a_second_signal_kills_the_remaining_processes(tmp_path):
    script = (
        "import sys, time\n"
        "from agentrl.supervise import StoppedBySignalError, SupervisedProcess, Supervisor\n"
        "from agentrl.supervise import raise_on_signals\n"
        "code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'\n"
        "supervisor = Supervisor(print)\n"
        "try:\n"
        "    with raise_on_signals():\n"
        "        try:\n"
        "            main = SupervisedProcess('main', [sys.executable, '-c', code], None, {})\n"
        "            supervisor.start(main)\n"
        f"            open({str(tmp_path / 'ready')!r}, 'w').write(str(main.process.pid))\n"
        "            time.sleep(60)\n"
        "        finally:\n"
        f"            open({str(tmp_path / 'stopping')!r}, 'w').close()\n"
        "            supervisor.stop(50)\n"
        "except StoppedBySignalError as stopped:\n"
        "    sys.exit(stopped.exit_code)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    wait_until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text())
    child = int((tmp_path / "ready").read_text())
    process.terminate()
    wait_until((tmp_path / "stopping").exists)
    deadline = time.monotonic() + 30
    while not is_gone(child) and time.monotonic() < deadline:
        process.terminate()
        time.sleep(0.5)
    assert process.wait(10) == 143


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
