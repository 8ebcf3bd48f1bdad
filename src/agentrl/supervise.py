"""Supervise the processes of a run on one machine: start them, restart crashed ones, stop all of them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from agentrl.errors import AgentRLError, ConfigError
from agentrl.processes import ChildProcess, exit_reason, process_tree, signal_session

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
POLL_SECONDS = 0.3
STOP_SECONDS = 25.0
"""Time that the processes have to stop; those left are killed."""

SAVE_SECONDS = 900.0
"""Time that the main process has to finish its step and save after its deadline."""

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
_STEADY_SECONDS = 300.0
"""A process that has run for this long has recovered: its earlier crashes no longer count."""

_CLIENTS_SECONDS = 12.0
"""Time for which engines and tool servers are kept running while the samplers stop."""

_REPEATED_SECONDS = 1.0
"""Signals within this time are one request: a launcher such as ``timeout`` forwards a signal of its group."""

_KILL_SECONDS = 5.0
_MARKER = "AGENTRL_SUPERVISED_BY"


class StoppedBySignalError(BaseException):
    """SIGTERM or SIGINT asked this process to stop; ``exit_code`` is 128 plus the signal, as in a shell."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@dataclass
class SupervisedProcess(ChildProcess):
    """One process of the run; ``process`` is None once it has ended successfully.

    Engines and tool servers set ``is_server``: they are stopped after the processes that use them.
    """

    is_server: bool = False
    restarts: int = 0
    started_at: float = 0.0
    restart_at: float | None = None

    def start(self) -> None:
        """Start or restart the process."""
        self.restart_at = None
        self.started_at = time.monotonic()
        super().start()


class Supervisor:
    """Keeps helper processes running while one main process runs; ``stop`` ends all of them."""

    def __init__(self, report: Callable[[str], None] = logger.warning) -> None:
        """``report`` receives a line about each process that crashed."""
        self._report = report
        self._members: list[SupervisedProcess] = []
        self._mark = uuid.uuid4().hex

    def start(self, member: SupervisedProcess) -> None:
        """Start a process; it is restarted when it crashes, up to MAX_RESTARTS times."""
        member.env = {**member.env, _MARKER: self._mark}
        self._members.append(member)
        member.start()

    def run_main(self, main: SupervisedProcess, *, deadline: float | Callable[[], float]) -> int:
        """Run ``main`` to its end and return its exit code.

        At ``deadline`` (monotonic seconds) it receives SIGTERM, so that it can finish its step and save; it
        is killed if that takes more than SAVE_SECONDS. A deadline that moves is a function.
        Raises ConfigError if a helper ends because of its configuration, and AgentRLError if one has crashed
        too often.
        """
        self.start(main)
        process = main.process
        assert process is not None
        killed_at: float | None = None
        while process.poll() is None:
            self._restart_crashed(main)
            now = time.monotonic()
            if killed_at is not None and now > killed_at:
                signal_session(process, signal.SIGKILL)
            elif killed_at is None and now > (deadline() if callable(deadline) else deadline):
                killed_at = now + SAVE_SECONDS
                signal_session(process, signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        return process.returncode

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Wait for ``event``, at most ``seconds``. Raises the errors of ``run_main``."""
        deadline = time.monotonic() + seconds
        while not event.wait(POLL_SECONDS) and time.monotonic() < deadline:
            self._restart_crashed(None)

    def run_helpers(self) -> None:
        """Run until every helper has ended by itself. Raises the errors of ``run_main``."""
        while any(member.process is not None for member in self._members):
            self._restart_crashed(None)
            time.sleep(POLL_SECONDS)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop all processes within ``seconds``; another SIGINT or SIGTERM kills those left at once."""
        members, self._members = self._members, []
        deadline = time.monotonic() + seconds
        tree = _ProcessTree(members, self._mark)
        try:
            with raise_on_signals(after=_REPEATED_SECONDS):
                clients = [member for member in members if not member.is_server]
                _terminate(clients)
                helpers = [member for member in clients if member.log is not None]
                _wait(
                    lambda: all(each.pid is None for each in helpers), deadline - seconds + _CLIENTS_SECONDS
                )
                _terminate([member for member in members if member.is_server])
                _wait(lambda: not tree.running(), deadline)
        except StoppedBySignalError:
            logger.warning("second request to stop: killing the remaining processes")
        finally:
            tree.kill()

    def _restart_crashed(self, main: SupervisedProcess | None) -> None:
        for member in self._members:
            if member is main or member.process is None:
                continue
            if member.restart_at is not None:
                if time.monotonic() >= member.restart_at:
                    member.start()
            elif member.process.poll() is not None:
                self._plan_restart(member, member.process.returncode)

    def _plan_restart(self, member: SupervisedProcess, code: int) -> None:
        if code == 0:
            member.process = None
            return
        if code == ConfigError.exit_code:
            raise ConfigError(f"{member.name} cannot run: {exit_reason(member.log)}", hint=_see(member.log))
        if time.monotonic() - member.started_at >= _STEADY_SECONDS:
            member.restarts = 0
        member.restarts += 1
        if member.restarts > MAX_RESTARTS:
            raise AgentRLError(
                f"{member.name} has ended {member.restarts} times, the last time with exit code {code}:"
                f" {exit_reason(member.log)}",
                hint=_see(member.log),
            )
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (member.restarts - 1))
        member.restart_at = time.monotonic() + delay
        self._report(
            f"{member.name} ended with exit code {code}; restarting it in {delay:g} s:"
            f" {exit_reason(member.log).partition(chr(10))[0]}"
        )


class _ProcessTree:
    """The processes of ``members`` and everything that they started."""

    def __init__(self, members: Sequence[SupervisedProcess], mark: str) -> None:
        self._processes = [member.process for member in members if member.process is not None]
        self._known = {process.pid for process in self._processes}
        self._mark = f"{_MARKER}={mark}"

    def running(self) -> set[int]:
        """Return the ids of the running processes, including those whose parent has ended."""
        ended = {process.pid for process in self._processes if process.poll() is not None}
        self._known = process_tree(self._known - ended, self._mark)
        return self._known

    def kill(self) -> None:
        """Send SIGKILL to the processes that still run."""
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)


@contextlib.contextmanager
def raise_on_signals(after: float = 0.0) -> Iterator[None]:
    """Raise StoppedBySignalError on SIGTERM and SIGINT; for ``after`` seconds they are ignored."""
    began = time.monotonic()

    def stop(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - began >= after:
            raise StoppedBySignalError(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _see(log: Path | None) -> str:
    return f"its log is {log}" if log is not None else "see the error above"


def _terminate(members: Sequence[SupervisedProcess]) -> None:
    for member in members:
        member.signal(signal.SIGTERM)


def _wait(condition: Callable[[], bool], deadline: float) -> None:
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
