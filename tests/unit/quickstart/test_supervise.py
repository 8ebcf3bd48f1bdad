"""The supervisor, with real child processes."""

import os
import sys
import time

import pytest

from agentrl.errors import AgentRLError
from agentrl.processes import signal_session
from agentrl.quickstart.supervise import MAX_RESTARTS, Member, Supervisor


def member(name, code, log=None):
    return Member(name, [sys.executable, "-c", code], log, dict(os.environ))


SLEEP = "import time; time.sleep(60)"
FAR = float("inf")


@pytest.fixture
def supervisor():
    supervisor = Supervisor()
    yield supervisor
    supervisor.stop(5)


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


def test_the_main_processes_exit_code_is_returned(supervisor):
    assert supervisor.run_main(member("main", "raise SystemExit(3)"), deadline=FAR) == 3


def test_at_the_deadline_the_main_process_is_asked_to_end(supervisor):
    code = "import signal,sys,time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(7)); time.sleep(60)"
    main = member("main", code)
    exit_code = supervisor.run_main(main, deadline=time.monotonic() + 3.0)
    assert exit_code == 7


def test_a_killed_helper_is_started_again(supervisor):
    helper = member("helper", SLEEP)
    supervisor.start(helper)
    first = helper.process.pid
    signal_session(helper.process, 9)
    helper.process.wait(10)
    supervisor.run_main(member("main", "import time; time.sleep(1)"), deadline=FAR)
    assert helper.restarts == 1
    assert helper.process.pid != first


def test_a_helper_that_keeps_dying_ends_the_run_and_shows_its_log(supervisor, tmp_path):
    supervisor.start(member("helper", "raise SystemExit('no luck today')", tmp_path / "helper.log"))
    with pytest.raises(AgentRLError, match=f"helper has ended {MAX_RESTARTS + 1} times") as error:
        supervisor.run_main(member("main", SLEEP), deadline=FAR)
    assert "no luck today" in str(error.value)


def test_stop_ends_every_process(supervisor):
    helpers = [member(f"helper-{n}", SLEEP) for n in range(3)]
    for helper in helpers:
        supervisor.start(helper)
    supervisor.stop(5)
    assert all(helper.process.returncode is not None for helper in helpers)


def test_children_die_with_their_parent(tmp_path):
    """A starter that is killed outright takes its child with it."""
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
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    starter.process.kill()
    starter.process.wait(10)
    child = int(pid_file.read_text())

    def gone():
        try:
            with open(f"/proc/{child}/stat") as stat:
                return stat.read().split()[2] == "Z"
        except FileNotFoundError:
            return True

    wait_for(gone)
