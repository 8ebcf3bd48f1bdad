"""Child processes: start them, restart crashed ones, end them with their parent, and identify others."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import getpass
import hashlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from agentrl.base.concurrency import Backoff
from agentrl.errors import AgentRLError, ConfigError, CostLimitError

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_TWO_A_CORE = Path("/sys/devices/system/cpu/smt/active")
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_MOST_CORES = 16
_GRACE_SECONDS = 20.0
_ENDED = ("Z", "X", "x")
"""States of a process in ``/proc/PID/stat`` that has ended."""
_OWNER = re.compile(r"-(\d+)\.(\d+)\.([0-9a-f]{8})\.[0-9a-f]{8}$")
"""The end of an owned name: pid, start time, machine and a random part."""

# Runs the command and exits with its exit code. When the parent ends, the kernel sends SIGHUP to this shell,
# which then kills its process group, itself included: workers of a killed server may outlive the server.
_GUARD = """
trap 'kill -KILL 0' HUP
trap : TERM
"$@" &
while :; do
    wait $!; code=$?
    kill -0 $! 2>/dev/null || exit $code
done
"""


@dataclass
class ChildProcess:
    """A command that can be started repeatedly, in a session of its own, and that ends with its parent.

    stdout and stderr are appended to ``log``; with None they are those of this process. ``process`` is the
    current or last run of the command; None if there is none.
    """

    name: str
    command: Sequence[str]
    log: Path | None
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None while it does not run."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def start(self) -> None:
        """Start the command. Call it from a long-lived thread, see ``start_child``."""
        self.process = start_child(self.command, log=self.log, env=self.env)

    def signal(self, number: int) -> bool:
        """Send a signal to the process and all that it started; return False if it does not run."""
        if self.process is None or self.process.poll() is not None:
            return False
        signal_session(self.process, number)
        return True


def start_child(
    command: Sequence[str],
    *,
    log: Path | None,
    env: Mapping[str, str] | None = None,
    is_guarded: bool = False,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own; the kernel sends it SIGTERM when this thread ends.

    Call it from a long-lived thread: the kernel watches the thread that started the child, not the process.
    stdout and stderr are appended to ``log``; with None they are those of this process. With ``is_guarded``
    the whole session is killed when this thread ends, including processes that ``command`` started. The file
    descriptors ``pass_fds`` stay open in the child, which runs in the folder ``cwd``.
    """
    parent = os.getpid()

    def bind_to_parent() -> None:
        if is_guarded:  # under nohup a child inherits an ignored SIGHUP, which a shell cannot trap
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP if is_guarded else signal.SIGTERM)
        # Look again: a parent that ended before prctl causes no signal any more.
        if os.getppid() != parent:
            os._exit(1)

    words = ["/bin/sh", "-c", _GUARD, "guard", *command] if is_guarded else command
    with contextlib.ExitStack() as stack:
        sink = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = stack.enter_context(log.open("ab"))
        return subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=sink,
            stderr=None if sink is None else subprocess.STDOUT, start_new_session=True,
            preexec_fn=bind_to_parent, pass_fds=pass_fds, cwd=cwd,
        )  # fmt: skip


def run_child(command: Sequence[str], *, log: Path | None, env: Mapping[str, str], seconds: float) -> int:
    """Run ``command`` to its end and return its exit code.

    Raises subprocess.TimeoutExpired after ``seconds``. The command is stopped if this call is interrupted.
    """
    child = start_child(command, log=log, env=env)
    try:
        return child.wait(seconds)
    finally:
        stop_child(child)


def stop_child(process: subprocess.Popen[bytes], grace_seconds: float = _GRACE_SECONDS) -> int:
    """Send SIGTERM to the session, and SIGKILL to what is left of it after ``grace_seconds``.

    Returns the exit code.
    """
    signal_session(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(grace_seconds)
    return process.returncode


def stop_children(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop several processes in parallel: send SIGTERM to all of them, then wait."""
    for process in processes:
        signal_session(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        stop_child(process, max(0.1, deadline - time.monotonic()))


def signal_session(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a child and to everything that it started; do nothing if the child has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def thread_limits(threads: int = 1) -> dict[str, str]:
    """Return environment variables that limit the threads of a child.

    With more threads than cores, the spinning of OpenMP slows every process down.
    """
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}


def half_of_cores() -> int:
    """Return the threads of each of two processes that compute at once on this machine, from 1 to 8.

    Cores are the physical ones that this process may use, by its affinity and its container's CPU limit.
    """
    cores: float = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        cores /= 1 + int(_TWO_A_CORE.read_text(encoding="ascii"))
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit: "max 100000"
        quota, period = _CPU_LIMIT.read_text(encoding="ascii").split()
        cores = min(cores, int(quota) / int(period))
    return max(1, int(min(cores, _MOST_CORES) / 2))


def free_port(*wanted: int) -> int:
    """Return the first port of ``wanted`` that is free on the loopback interface, else any free one."""
    for port in (*wanted, 0):
        with socket.socket() as probe:
            # Count a port in TIME_WAIT as free: servers set this option, too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port of the loopback interface is free")


def user_name() -> str:
    """Return the name of this process's user; its number if it has none, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def tail(log: Path, lines: int = 15, limit: int = 16_384) -> str:
    """Return the last ``lines`` of a log file, from at most its last ``limit`` bytes."""
    try:
        with log.open("rb") as source:
            source.seek(0, os.SEEK_END)
            source.seek(max(0, source.tell() - limit))
            text = source.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def exit_reason(log: Path | None) -> str:
    """Return why a process ended: the last error in its log, with its hint; else the last lines."""
    text = tail(log) if log is not None else ""
    lines = text.splitlines()
    for index in reversed(range(len(lines))):
        _, is_error, message = lines[index].partition(": error: ")
        if is_error:
            return "\n".join([message, *lines[index + 1 :]])
    return text or "it has written nothing"


def process_tree(pids: Collection[int], marker: str) -> set[int]:
    """Return the ids of the running processes ``pids``, their descendants, and processes with ``marker``.

    ``marker`` is ``NAME=value`` in the environment: it finds processes whose parent has ended.
    """
    children: dict[int, list[int]] = {}
    running = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if state == "Z":
            continue
        children.setdefault(int(parent), []).append(pid)
        if pid in pids or marker.encode() in environment:
            running.append(pid)
    tree: set[int] = set()
    while running:
        pid = running.pop()
        if pid not in tree:
            tree.add(pid)
            running += children.get(pid, ())
    return tree - {os.getpid()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Identifies one process for all time: a host name and a pid alone are reused."""

    boot_id: str
    """Boot id of its kernel."""
    pid_namespace: str
    """Namespace of ``pid``."""
    pid: int
    started: int
    """Clock ticks from the boot to its start, which differ from those of a later process with this pid."""


def identify(pid: int) -> ProcessIdentity | None:
    """Identify a running process of this machine and pid namespace; None if /proc does not show it."""
    started = start_ticks(pid)
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    if started is None:
        return None
    return ProcessIdentity(boot_id=boot_id, pid_namespace=namespace, pid=pid, started=started)


def has_ended(process: ProcessIdentity) -> bool:
    """Return True only if the process is known to have ended; False if it cannot be observed from here."""
    if not is_observable(process):
        return False
    started = start_ticks(process.pid)
    if started is not None:
        return started != process.started
    # Ask the kernel too: /proc may hide the processes of other users.
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    fields = _stat(process.pid)
    return fields is not None and fields[0] in _ENDED


def is_observable(process: ProcessIdentity) -> bool:
    """Return whether the process belongs to this kernel boot and to this process's pid namespace."""
    here = identify(os.getpid())
    return here is not None and (here.boot_id, here.pid_namespace) == (
        process.boot_id, process.pid_namespace
    )  # fmt: skip


def owned_name(name: str) -> str:
    """Return a new name, whose end tells every process of this machine that this process made it."""
    process = identify(os.getpid())
    token = secrets.token_hex(4)
    if process is None:
        return f"{name}-{os.getpid()}.{token}"
    return f"{name}-{process.pid}.{process.started}.{_machine(process)}.{token}"


def owner_of(name: str) -> ProcessIdentity | None:
    """Return the process that made an owned name; None if it cannot be observed from here."""
    here, owner = identify(os.getpid()), _OWNER.search(name)
    if here is None or owner is None or owner[3] != _machine(here):
        return None
    return replace(here, pid=int(owner[1]), started=int(owner[2]))


def _machine(process: ProcessIdentity) -> str:
    """Return a short hash of the kernel boot and the pid namespace of ``process``."""
    text = f"{process.boot_id} {process.pid_namespace}"
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot: with the pid, it identifies the process.

    None if it has ended or is not shown.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in _ENDED else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` after the command's name; the first is the state."""
    try:
        # Split behind the last bracket: a process may have brackets and spaces in its name.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None


logger = logging.getLogger(__name__)

STOPPED = 130
"""Exit code of a command that a signal has stopped, as in a shell."""


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATED_SECONDS = 1.0
"""Signals within this time are one request: a launcher such as ``timeout`` forwards a signal of its group."""


def stop_on_signals(at_once: asyncio.Event | None = None) -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; a second signal sets ``at_once``.

    With ``at_once`` a third signal ends the process without any cleanup: the work that hangs may be that.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    first: float | None = None

    def received() -> None:
        nonlocal first
        stop.set()
        # Count signals, not what else sets ``stop``: the first one after a request to drain ends no call.
        if first is None:
            first = time.monotonic()
        elif at_once is not None and time.monotonic() - first >= REPEATED_SECONDS:
            logger.warning("second request to stop: calls that still run are cancelled")
            at_once.set()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, received)
    return stop


async def cancel_on_signals(work: Coroutine[Any, Any, int]) -> int:
    """Return the exit code of ``work``; SIGTERM and SIGINT cancel it, which lets it clean up: 143 and 130.

    SIGINT too: a job that a shell runs in the background ignores it otherwise.
    """
    task, received = asyncio.create_task(work), list[int]()

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


MAX_RESTARTS = 5
POLL_SECONDS = 0.3
STOP_SECONDS = 15.0
"""Time that the processes have to stop after they have drained; those left are killed."""

SAVE_SECONDS = 900.0
"""Time that the main process has to finish its step and save, if no step and no checkpoint was measured."""

_LONGER = 3.0
"""How many times as long as measured the end of the main process may take."""
_REPORT_SECONDS = 15.0
"""Interval of the lines about what is waited for, where the output is no terminal."""

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
_STEADY_SECONDS = 300.0
"""A process that has run for this long has recovered: its earlier crashes no longer count."""

_CLIENTS_SECONDS = 2.0
"""Time for which engines and tool servers are kept running after the samplers should have drained."""

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

    Engines and tool servers set ``is_server``: they are stopped after the processes that use them. One that
    ``is_main`` is not restarted.
    """

    is_server: bool = False
    is_main: bool = False
    restarts: int = 0
    started_at: float = 0.0
    restart_at: float | None = None

    def start(self) -> None:
        """Start or restart the process."""
        self.restart_at = None
        self.started_at = time.monotonic()
        super().start()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How long a main process that was asked to end needs for it."""

    what: str
    """What is waited for, such as ``step 7 is saved``."""
    seconds: float | None = None
    """What is left of it, as measured before; None if nothing was."""
    longest: float = 0.0
    """The whole of it, as measured before."""

    @property
    def limit(self) -> float:
        """The seconds after which the process is killed: it may take longer than before."""
        return SAVE_SECONDS if self.seconds is None else STOP_SECONDS + _LONGER * self.longest

    def line(self, elapsed: float) -> str:
        """Return what to tell after ``elapsed`` seconds."""
        left, is_longer = f"at most {max(0.0, self.limit - elapsed):.0f} s", ""
        if self.seconds is not None and elapsed <= self.seconds:
            left = f"about {self.seconds - elapsed:.0f} s"
        elif self.seconds is not None:
            is_longer = ", longer than before"
        return f"{left} until {self.what}{is_longer}; Ctrl-C again ends at once"


class Supervisor:
    """Keeps helper processes running while one main process runs; ``stop`` ends all of them."""

    def __init__(
        self,
        report: Callable[[str], None] = logger.warning,
        ending: Callable[[], Ending | None] = lambda: None,
    ) -> None:
        """``report`` receives a line about each process that crashed, and about the end of the main process.

        ``ending`` returns how long the main process needs to end; None: ``STOP_SECONDS``, as the others.
        """
        self._report = report
        self._ending = ending
        self._members: list[SupervisedProcess] = []
        self._main: SupervisedProcess | None = None
        self._mark = uuid.uuid4().hex

    def start(self, member: SupervisedProcess) -> None:
        """Start a process; it is restarted when it crashes, up to MAX_RESTARTS times."""
        member.env = {**member.env, _MARKER: self._mark if member is not self._main else f"{self._mark}-main"}
        self._members.append(member)
        member.start()

    def run_main(self, main: SupervisedProcess, *, deadline: float | Callable[[], float]) -> int:
        """Run ``main`` to its end and return its exit code.

        At ``deadline`` (monotonic seconds) it receives SIGTERM, so that it can finish its step and save; it
        is killed if that takes more than SAVE_SECONDS, and more than it needs. A deadline that moves is a
        function.
        Raises ConfigError if a helper ends because of its configuration, and AgentRLError if one has crashed
        too often.
        """
        main.is_main = True
        self._main = main
        self.start(main)
        process = main.process
        assert process is not None
        killed_at: float | None = None
        while process.poll() is None:
            self._restart_crashed()
            now = time.monotonic()
            if killed_at is not None and now > killed_at:
                signal_session(process, signal.SIGKILL)
            elif killed_at is None and now > (deadline() if callable(deadline) else deadline):
                signal_session(process, signal.SIGTERM)
                ending = self._ending()
                killed_at = now + max(SAVE_SECONDS, 0.0 if ending is None else ending.limit)
            time.sleep(POLL_SECONDS)
        return process.returncode

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Wait for ``event``, at most ``seconds``. Raises the errors of ``run_main``."""
        deadline = time.monotonic() + seconds
        while not event.wait(POLL_SECONDS) and time.monotonic() < deadline:
            self._restart_crashed()

    def run_helpers(self) -> None:
        """Run until every helper has ended by itself. Raises the errors of ``run_main``."""
        while any(member.process is not None for member in self._members):
            self._restart_crashed()
            time.sleep(POLL_SECONDS)

    def stop(self, drain_seconds: float) -> None:
        """Stop all processes within ``drain_seconds``, which are the samplers', and ``STOP_SECONDS``.

        The main process has the time that it needs to end. Another SIGINT or SIGTERM kills those left at
        once.
        """
        members, self._members = self._members, []
        began = time.monotonic()
        drained = began + drain_seconds
        deadline = drained + STOP_SECONDS
        main = None if self._main is None or self._main.pid is None else self._main
        others = _ProcessTree([member for member in members if member is not self._main], self._mark)
        own = _ProcessTree([member for member in members if member is self._main], f"{self._mark}-main")
        say = _Line(self._report)
        try:
            with raise_on_signals(after=REPEATED_SECONDS):
                clients = [member for member in members if not member.is_server]
                _terminate(clients)
                ending = None if main is None else self._ending()

                def wait(is_over: Callable[[], bool], until: float) -> None:
                    while not is_over() and time.monotonic() < until:
                        if ending is not None and main is not None and main.pid is not None:
                            say(ending.line(time.monotonic() - began))
                        time.sleep(0.1)

                helpers = [member for member in clients if member.log is not None]
                wait(lambda: all(each.pid is None for each in helpers), drained + _CLIENTS_SECONDS)
                _terminate([member for member in members if member.is_server])
                wait(lambda: not (others.running() or own.running()), deadline)
                others.kill()
                if ending is not None:
                    wait(lambda: not own.running(), began + ending.limit)
        except StoppedBySignalError:
            logger.warning("second request to stop: killing the remaining processes")
        finally:
            say.end()
            others.kill()
            own.kill()

    def _restart_crashed(self) -> None:
        for member in self._members:
            if member.is_main or member.process is None:
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
        if code == CostLimitError.exit_code:
            raise CostLimitError(f"{member.name} ended: {exit_reason(member.log)}")
        if time.monotonic() - member.started_at >= _STEADY_SECONDS:
            member.restarts = 0
        member.restarts += 1
        if member.restarts > MAX_RESTARTS:
            raise AgentRLError(
                f"{member.name} has ended {member.restarts} times, the last time with exit code {code}:"
                f" {exit_reason(member.log)}",
                hint=_see(member.log),
            )
        delay = Backoff(member.name, _FIRST_DELAY, _LONGEST_DELAY, attempts=member.restarts - 1).next()
        member.restart_at = time.monotonic() + delay
        self._report(
            f"{member.name} ended with exit code {code}; restarting it in {delay:g} s:"
            f" {exit_reason(member.log).partition(chr(10))[0]}"
        )


class _Line:
    """Shows a line that changes: in place on a terminal, else by ``report`` now and then."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._next = 0.0

    def __call__(self, text: str) -> None:
        now, is_terminal = time.monotonic(), sys.stdout.isatty()
        if now < self._next:
            return
        self._next = now + (1.0 if is_terminal else _REPORT_SECONDS)
        if is_terminal:  # leave the cursor at its beginning: what a process prints covers it
            width = shutil.get_terminal_size().columns
            print(f"\x1b[K{text[: width - 1]}\r", end="", flush=True)
        else:
            self._report(text)

    def end(self) -> None:
        """Remove the line from the terminal."""
        if self._next and sys.stdout.isatty():
            print("\x1b[K", end="", flush=True)


class _ProcessTree:
    """The processes of ``members`` and everything that they started."""

    def __init__(self, members: Sequence[SupervisedProcess], mark: str) -> None:
        self._processes = [member.process for member in members if member.process is not None]
        self._known = {process.pid for process in self._processes}
        self._mark = f"{_MARKER}={mark}"

    def running(self) -> set[int]:
        """Return the ids of the running processes, including those whose parent has ended."""
        ended = {process.pid for process in self._processes if process.poll() is not None}
        # Leave out what has ended: its pid may be that of a stranger by now.
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
