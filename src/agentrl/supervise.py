"""Supervises the processes of a run on one machine: starts them, restarts crashed ones, stops all of them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from agentrl.errors import AgentRLError, ConfigError
from agentrl.processes import living_family, signal_session, start_child, tail

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
POLL_SECONDS = 0.3
STOP_SECONDS = 25.0
"""How long processes may take to stop; what is left then is killed."""

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
_STEADY_SECONDS = 300.0
"""A process that has run for this long has recovered: its earlier crashes are forgotten."""

_CLIENTS_SECONDS = 12.0
"""How long engines and tool servers are kept for the samplers that stop before them."""

_REPEATED_SECONDS = 1.0
"""A launcher such as ``timeout`` forwards a signal that its whole group receives: that is one request."""

_KILL_SECONDS = 5.0
_MARKER = "AGENTRL_SUPERVISED_BY"


class StoppedBySignalError(BaseException):
    """SIGTERM or SIGINT asked this process to stop; ``exit_code`` is the shell's, 128 and the number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@dataclass
class Member:
    """One process of the run; ``process`` is its current incarnation, None once it has ended well.

    ``serves`` is True for engines and tool servers: they are stopped after the processes that use them.
    """

    name: str
    command: Sequence[str]
    log: Path | None
    env: Mapping[str, str]
    serves: bool = False
    process: subprocess.Popen[bytes] | None = None
    restarts: int = field(default=0)
    started_at: float = 0.0
    restart_at: float | None = None

    def start(self) -> None:
        """Start it, or start it again."""
        self.restart_at = None
        self.started_at = time.monotonic()
        self.process = start_child(self.command, log=self.log, env=self.env)


class Supervisor:
    """Keeps helpers alive while one main process runs; whatever happens, ``stop`` leaves nothing behind."""

    def __init__(self, say: Callable[[str], None] = logger.warning) -> None:
        """``say`` prints a line about a process that ended."""
        self._say = say
        self._members: list[Member] = []
        self._mark = uuid.uuid4().hex

    def start(self, member: Member) -> None:
        """Start a helper process; it is restarted when it crashes, up to MAX_RESTARTS times."""
        member.env = {**member.env, _MARKER: self._mark}
        self._members.append(member)
        member.start()

    def run_main(self, main: Member, *, deadline: float) -> int:
        """Run ``main`` to its end and return its exit code.

        At ``deadline`` (monotonic seconds) it gets SIGTERM, which lets it finish its step and save.
        Raises ConfigError once a helper ends because of its configuration, and AgentRLError once one has
        crashed too often.
        """
        self.start(main)
        process = main.process
        assert process is not None
        asked = False
        while process.poll() is None:
            self._revive(main)
            if not asked and time.monotonic() > deadline:
                asked = True
                signal_session(process, signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        return process.returncode

    def run_helpers(self) -> None:
        """Run until every helper has ended by itself. Raises as ``run_main``."""
        while any(member.process is not None for member in self._members):
            self._revive(None)
            time.sleep(POLL_SECONDS)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop everything within ``seconds``; a further SIGINT or SIGTERM kills what is left at once."""
        members, self._members = self._members, []
        deadline = time.monotonic() + seconds
        family = _Family(members, self._mark)
        try:
            with stop_on_signals(after=_REPEATED_SECONDS):
                clients = [member for member in members if not member.serves]
                _terminate(clients)
                helpers = [member for member in clients if member.log is not None]
                _wait(lambda: all(_is_gone(each) for each in helpers), deadline - seconds + _CLIENTS_SECONDS)
                _terminate([member for member in members if member.serves])
                _wait(lambda: not family.living(), deadline)
        except StoppedBySignalError:
            logger.warning("asked again: the processes that are left are killed")
        finally:
            family.kill()

    def _revive(self, main: Member | None) -> None:
        for member in self._members:
            if member is main or member.process is None:
                continue
            if member.restart_at is not None:
                if time.monotonic() >= member.restart_at:
                    member.start()
            elif member.process.poll() is not None:
                self._ended(member, member.process.returncode)

    def _ended(self, member: Member, code: int) -> None:
        if code == 0:
            member.process = None
            return
        if code == ConfigError.exit_code:
            raise ConfigError(f"{member.name} cannot run: {reason(member.log)}", hint=_see(member.log))
        if time.monotonic() - member.started_at >= _STEADY_SECONDS:
            member.restarts = 0
        member.restarts += 1
        if member.restarts > MAX_RESTARTS:
            raise AgentRLError(
                f"{member.name} has ended {member.restarts} times, the last time with exit code {code}:"
                f" {reason(member.log)}",
                hint=_see(member.log),
            )
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (member.restarts - 1))
        member.restart_at = time.monotonic() + delay
        self._say(
            f"{member.name} ended with exit code {code}; starting it again in {delay:g} s:"
            f" {reason(member.log).partition(chr(10))[0]}"
        )


class _Family:
    """The processes of ``members`` and everything that they have started."""

    def __init__(self, members: Sequence[Member], mark: str) -> None:
        self._processes = [member.process for member in members if member.process is not None]
        self._known = {process.pid for process in self._processes}
        self._mark = f"{_MARKER}={mark}"

    def living(self) -> set[int]:
        """Process ids; a child whose parent has ended still belongs to it."""
        ended = {process.pid for process in self._processes if process.poll() is not None}
        living = living_family(self._known - ended, self._mark)
        self._known = living
        return living

    def kill(self) -> None:
        """SIGKILL to what is left."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)


@contextlib.contextmanager
def stop_on_signals(after: float = 0.0) -> Iterator[None]:
    """Within the block, SIGTERM and SIGINT raise StoppedBySignalError; before ``after`` seconds, nothing."""
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


def reason(log: Path | None) -> str:
    """Why a process ended: the last error in its log, with its fix; else the last lines."""
    text = tail(log) if log is not None else ""
    lines = text.splitlines()
    for place in reversed(range(len(lines))):
        _, found, message = lines[place].partition(": error: ")
        if found:
            return "\n".join([message, *lines[place + 1 :]])
    return text or "it has written nothing"


def _see(log: Path | None) -> str:
    return f"its log is {log}" if log is not None else "the reason stands above"


def _terminate(members: Sequence[Member]) -> None:
    for member in members:
        if member.process is not None:
            signal_session(member.process, signal.SIGTERM)


def _is_gone(member: Member) -> bool:
    return member.process is None or member.process.poll() is not None


def _wait(condition: Callable[[], bool], deadline: float) -> None:
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
