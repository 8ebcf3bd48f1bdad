"""Processes: children that never outlive their parent, and who a process is, so that its end can be seen."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from agentrl.documents.run import ProcessIdentity

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def start_child(
    command: Sequence[str],
    *,
    log: Path | None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own; the kernel sends it SIGTERM when this thread ends.

    Call it from a long-lived thread: the kernel watches the thread that started the child, not the
    process. Output goes to the end of ``log`` (both streams), or to this process's own.
    """
    parent = os.getpid()

    def bind_to_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    if log is None:
        return subprocess.Popen(
            command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=bind_to_parent,
        )  # fmt: skip
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        return subprocess.Popen(
            command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=bind_to_parent,
        )  # fmt: skip


def stop_child(process: subprocess.Popen[bytes], grace_seconds: float = 20.0) -> int:
    """SIGTERM, then after ``grace_seconds`` SIGKILL to the whole session. Returns the exit code."""
    signal_session(process, signal.SIGTERM)
    try:
        process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        signal_session(process, signal.SIGKILL)
        process.wait(grace_seconds)
    return process.returncode


def stop_children(processes: Sequence[subprocess.Popen[bytes]], grace_seconds: float = 20.0) -> None:
    """Stop several at once: all get SIGTERM first, so that they end side by side."""
    for process in processes:
        signal_session(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        stop_child(process, max(0.1, deadline - time.monotonic()))


def signal_session(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a child and to everything it started; nothing happens where it has ended."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return


def living_family(pids: Collection[int], marker: str) -> set[int]:
    """Ids of the living processes among ``pids``, their descendants, and processes started with ``marker``.

    ``marker`` is ``NAME=value`` of the environment: it finds what a process that has ended has left behind.
    """
    children: dict[int, list[int]] = {}
    found = []
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
            found.append(pid)
    family: set[int] = set()
    while found:
        pid = found.pop()
        if pid not in family:
            family.add(pid)
            found += children.get(pid, ())
    return family - {os.getpid()}


def tail(log: Path, lines: int = 15, limit: int = 16_384) -> str:
    """The last ``lines`` of a log file, read from at most its last ``limit`` bytes."""
    try:
        with log.open("rb") as source:
            source.seek(0, os.SEEK_END)
            source.seek(max(0, source.tell() - limit))
            text = source.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def identify(pid: int) -> ProcessIdentity | None:
    """Identify a running process of this machine and pid namespace; None where /proc does not show it."""
    started = _start_ticks(pid)
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    if started is None:
        return None
    return ProcessIdentity(boot_id=boot_id, pid_namespace=namespace, pid=pid, started=started)


def has_ended(process: ProcessIdentity) -> bool:
    """Return True only if the process is known to have ended; False where it cannot be observed from here."""
    if not is_observable(process):
        return False
    started = _start_ticks(process.pid)
    if started is not None:
        return started != process.started
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _is_zombie(process.pid)


def is_observable(process: ProcessIdentity) -> bool:
    """Whether a process, if it runs, runs under this kernel and in this process's pid namespace."""
    here = identify(os.getpid())
    return here is not None and (here.boot_id, here.pid_namespace) == (
        process.boot_id, process.pid_namespace
    )  # fmt: skip


def _start_ticks(pid: int) -> int | None:
    """Clock ticks from the boot to the start of a process; None where it has ended or is not shown."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in _ENDED else int(fields[19])


def _is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] in _ENDED


_ENDED = ("Z", "X", "x")


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` behind the command's name; the first is the state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
