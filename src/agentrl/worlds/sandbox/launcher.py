"""Supervise one program: start it, read its output, watch its limits, kill all that it started.

A sampler starts this once, as a process of its own. For each program it passes a connection, writes a job and
reads one JSON object. A sampler that closes its side ends the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from agentrl.worlds.containers.output import Output
from agentrl.worlds.sandbox import linux, namespaces
from agentrl.worlds.sandbox.program import Job, PlainRun, Streams, descendants, memory_of, read_report
from agentrl.worlds.sandbox.rootfs import ContainerRun, Held, hold

_POLL_SECONDS: Final = 0.05
_SLOW_POLL_SECONDS: Final = 0.5
"""Of servers, of which hundreds may be idle."""
_SAVE_SECONDS: Final = 15.0
_CHUNK: Final = 65536
LENGTH_BYTES: Final = 8
"""A job is preceded by its length."""
_STOPPED = 128 + signal.SIGTERM


@dataclass
class Capture:
    """The pipe of an output."""

    descriptor: int
    output: Output
    closed: bool = False

    def read(self) -> bool:
        """Read the available bytes; return False if the limit is exceeded."""
        while not self.closed:
            try:
                chunk = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                return True
            self.closed = not chunk
            if not self.output.add(chunk):
                return False
        return True


def main() -> None:
    """Start a supervisor for each connection that arrives on standard input, until that is closed."""
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    while True:
        message, connections, _, _ = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _serve(socket.socket(fileno=connections[0]))
        os.close(connections[0])


def _serve(connection: socket.socket, held: Held | None = None) -> NoReturn:
    """Run the job of one connection, in a container that is ``held``, and answer on it."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        size = int.from_bytes(_receive(connection, LENGTH_BYTES), "big")
        job = Job(**json.loads(_receive(connection, size)))
        try:
            if job.holds:
                hold(job, connection, _serve)
                os._exit(0)
            result = supervise(job, connection.fileno(), held)
        except OSError as error:
            result = {"error": str(error)}
        connection.sendall(json.dumps(result).encode())
    except BaseException:  # noqa: BLE001  a supervisor must not return into the loop of its parent
        os._exit(1)
    os._exit(0)


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = connection.recv(min(_CHUNK, size - len(received)))
        if not chunk:
            raise EOFError
        received += chunk
    return received


def supervise(job: Job, connection: int, held: Held | None = None) -> dict[str, Any]:
    """Run the program to its end and return what ``Execution`` holds. Raises OSError if it cannot start.

    The program is killed when the sampler closes ``connection``.
    """
    forwarder, channel = (None, None)
    if job.namespaces and job.gateway is not None and held is None:
        forwarder, channel = namespaces.start_forwarder((job.gateway[0], job.gateway[1]))
    streams, captures = _open_streams(job)
    started = time.monotonic()
    run = _start(job, streams, channel, held)
    ended: dict[str, Any] = {}
    exceeded: str | None = "connection"
    peak = 0
    try:
        streams.close()
        exceeded, peak = _watch(run, captures, started, job, connection)
    finally:
        ended = run.end(keep_files=exceeded != "connection")
        if forwarder is not None:
            os.kill(forwarder, signal.SIGKILL)
    if "error" in ended and exceeded is None:
        return {"error": ended["error"]}
    at_end = _exceeded_at_end(job, captures, ended)
    exceeded = exceeded or at_end
    stdout, stderr = (capture.output for capture in captures)
    return {
        "stdout": stdout.text,
        "stderr": stderr.text,
        "stdout_bytes": stdout.total,
        "stderr_bytes": stderr.total,
        "exit_code": ended.get("status", -int(signal.SIGKILL)),
        "exceeded": exceeded,
        "seconds": time.monotonic() - started,
        "memory_mb": peak / (1 << 20),
        "kept": held is None and (exceeded is None or bool(job.command)) and bool(ended.get("kept", False)),
    }


def _open_streams(job: Job) -> tuple[Streams, list[Capture]]:
    """Return the streams of the program, and the captures of its standard output and error."""
    out_read, out_write = os.pipe()
    error_read, error_write = os.pipe()
    captures = []
    for descriptor in (out_read, error_read):
        os.set_blocking(descriptor, False)
        output = Output.of(int(job.limits["output_bytes"]), job.shown_bytes)
        captures.append(Capture(descriptor, output))
    return Streams(stdin=_input(job), stdout=_output(job, out_write), stderr=error_write), captures


def _start(
    job: Job, streams: Streams, channel: socket.socket | None, held: Held | None = None
) -> _NamespaceRun | PlainRun | ContainerRun:
    if held is not None:
        return ContainerRun(job, streams, held)
    return _NamespaceRun(job, streams, channel) if job.namespaces else PlainRun(job, streams)


def _exceeded_at_end(job: Job, captures: list[Capture], ended: dict[str, Any]) -> str | None:
    """Read what is left of the outputs; return the limit at which the program has ended by itself."""
    within_limit = [capture.read() for capture in captures]
    if not all(within_limit):
        return "output"
    if ended.get("status") == -signal.SIGXCPU:
        return "time"
    if job.command and (ended.get("full") or not ended.get("kept")):
        return "files"
    return None


class _NamespaceRun:
    """The program in namespaces; its first process reports on a pipe."""

    def __init__(self, job: Job, streams: Streams, channel: socket.socket | None) -> None:
        self._read, write = os.pipe()
        self._saves = bool(job.command)
        self._size = int(job.limits["disk_mb"]) << 20
        before = os.path.join(job.directory, "files.tar")
        after = os.path.join(job.directory, "files.new")
        files = (
            os.open(before, os.O_RDONLY) if job.keep_files and os.path.exists(before) else None,
            os.open(after, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if job.keep_files else None,
        )
        self.pid = namespaces.start(job, streams, files, write, channel)
        if channel is not None:
            channel.close()
        os.close(write)

    @property
    def waits_on(self) -> int:
        """Return the descriptor that becomes readable at the end."""
        return self._read

    def processes(self) -> Iterator[int]:
        """Yield what counts towards the memory."""
        return descendants(self.pid)

    def over_files(self) -> bool:
        """Return whether a command has filled its directory, a file system of limited size."""
        for first in list(descendants(self.pid))[1:2] if self._saves else ():
            with contextlib.suppress(OSError):
                work = f"/proc/{first}/root{namespaces.WORK}"
                disk = os.statvfs(work)
                if disk.f_blocks * disk.f_frsize == self._size:
                    return namespaces.is_full(work)
        return False

    def end(self, *, keep_files: bool) -> dict[str, Any]:
        """Kill what runs and return the report."""
        if keep_files and self._saves:  # its first process kills the others and keeps the files
            for first in list(descendants(self.pid))[1:2]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first, signal.SIGTERM)
            select.select([self._read], [], [], _SAVE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return read_report(self._read)


def _watch(
    run: _NamespaceRun | PlainRun | ContainerRun,
    captures: list[Capture],
    started: float,
    job: Job,
    connection: int,
    poll: float = _POLL_SECONDS,
) -> tuple[str | None, int]:
    """Wait for the end of the program or of its limits; return the limit exceeded and the largest memory."""
    deadline = started + float(job.limits["seconds"])
    memory, peak = int(job.limits["memory_mb"]) << 20, 0
    while True:
        open_pipes = [capture.descriptor for capture in captures if not capture.closed]
        wait = min(poll, max(0.0, deadline - time.monotonic()))
        readable, _, _ = select.select([run.waits_on, connection, *open_pipes], [], [], wait)
        if connection in readable:
            return "connection", peak
        for capture in captures:
            if not capture.read():
                return "output", peak
        if run.waits_on in readable:
            return None, peak
        peak = max(peak, sum(map(memory_of, run.processes())))
        if peak > memory:
            return "memory", peak
        if run.over_files():
            return "files", peak
        if time.monotonic() >= deadline:
            return "time", peak


def _input(job: Job) -> int:
    """Return a descriptor of the program's standard input."""
    if "in" in job.copies[:1]:
        return os.open(job.directory, os.O_RDONLY)
    descriptor = os.memfd_create("stdin")
    with os.fdopen(os.dup(descriptor), "wb") as target:
        target.write(job.stdin.encode(job.stdin_encoding, "surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _output(job: Job, pipe: int) -> int:
    """Return the descriptor of the program's standard output: ``pipe``, or an archive."""
    if "out" not in job.copies[:1]:
        return pipe
    os.close(pipe)
    return os.open(job.directory, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def main_attached() -> None:
    """Run the job of the first argument, in JSON, with the variables of this process that the second names.

    Exits with the program's code, or with 1 and a reason.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_STOPPED))
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    given, names = (json.loads(word) for word in sys.argv[1:])
    job = Job(**{**given, "environment": {name: os.environ[name] for name in names}})
    os.makedirs(job.directory, exist_ok=True)
    try:
        streams = Streams(stdin=os.dup(0), stdout=os.dup(1), stderr=os.dup(2))
        started = time.monotonic()
        run = _start(job, streams, None)
        streams.close()
        alive, _held = os.pipe()
        try:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)  # the client sees the end of the program's streams
            os.dup2(null, 1)
            exceeded, _ = _watch(run, [], started, job, alive, poll=_SLOW_POLL_SECONDS)
        finally:
            ended = run.end(keep_files=False)
        code, why = ended.get("status", 1), ended.get("error")
        if exceeded is not None:
            code, why = 1, f"its limit of {exceeded}"
    except OSError as error:
        code, why = 1, str(error)
    if why is not None:
        print(f"the sandbox ended the program: {why}", file=sys.stderr)
    sys.exit(code if code >= 0 else 128 - code)
