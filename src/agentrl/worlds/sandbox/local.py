"""Run programs in the sandbox of this machine; keep its launcher running, and connect to it for each."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from agentrl.base.atomic_folder import scratch_folder
from agentrl.base.untrusted_folder import discard
from agentrl.base.validation import Positive, PositiveWhole, SettingsModel
from agentrl.errors import AgentRLError, ConfigError, ToolServerError
from agentrl.worlds.containers.container import Execution
from agentrl.worlds.sandbox.launcher import LENGTH_BYTES
from agentrl.worlds.sandbox.linux import landlock_version
from agentrl.worlds.sandbox.program import Job

_SOURCE: Final = str(Path(__file__).resolve().parents[3])
_STOP_SECONDS: Final = 5.0
_ATTEMPTS: Final = 2
logger = logging.getLogger(__name__)

_GRACE_SECONDS: Final = 20.0
"""Time beyond a program's own limit for the launcher to start it, end it and keep its files."""

_running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Bounds the programs that run at a time: their time limits are by the clock."""


Isolation = Literal["auto", "namespaces", "limits", "docker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits(SettingsModel):
    """What one program may use. A program that exceeds a limit is killed with all that it started."""

    seconds: Positive = 10.0
    """Time by the clock."""
    cpu_seconds: PositiveWhole = 10
    """CPU time of each process."""
    memory_mb: PositiveWhole = 512
    """Memory of all its processes, and the address space of each."""
    processes: PositiveWhole = 32
    """Processes and threads at a time."""
    disk_mb: PositiveWhole = 64
    """Size of the files in its directory."""
    files: PositiveWhole = 2048
    """Number of the files in its directory."""
    open_files: PositiveWhole = 64
    """Open files of each process."""
    output_bytes: PositiveWhole = 65536
    """Standard output and standard error, each."""

    def as_dict(self) -> dict[str, Any]:
        """Return these limits by name, without what a subclass adds."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(SandboxLimits)}


class LauncherProcess:
    """A bare interpreter that forks a supervisor for each program; started at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> socket.socket:
        """Return a connection to a new supervisor. Starts the launcher again if it has died."""
        own, passed = socket.socketpair()
        try:
            with self._lock:
                self._pass(passed)
        except BaseException:
            own.close()
            raise
        finally:
            passed.close()
        return own

    def stop(self) -> None:
        """End the launcher; its supervisors end with their connections. Idempotent."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _pass(self, connection: socket.socket) -> None:
        for _ in range(_ATTEMPTS):
            control = self._control or self._start()
            try:
                socket.send_fds(control, [b"x"], [connection.fileno()])
            except OSError:
                self.stop()
                continue
            return
        raise ToolServerError("the sandbox's launcher does not start", hint="look for a lack of memory")

    def _start(self) -> socket.socket:
        own, passed = socket.socketpair()
        with contextlib.closing(passed):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", start_code("main")],
                stdin=passed.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
            )
        self._control = own
        return own


def start_code(function: str) -> str:
    """Return the code by which a bare interpreter (``-I -S``) runs a function of the launcher."""
    return (
        f"import sys; sys.path.insert(0, {_SOURCE!r});"
        f" from agentrl.worlds.sandbox import launcher; launcher.{function}()"
    )


def encode_job(job: Job) -> bytes:
    """Return a job as the launcher reads it."""
    body = json.dumps(dataclasses.asdict(job)).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


LAUNCHER: Final = LauncherProcess()
"""The launcher of this process."""

atexit.register(LAUNCHER.stop)


class LocalSandbox:
    """A private directory on this machine, and programs that run in it one after the other."""

    def __init__(
        self,
        limits: SandboxLimits,
        *,
        isolation: Isolation = "auto",
        python: str | None = None,
        visible: tuple[str, ...] = (),
    ) -> None:
        """``python`` is the interpreter, with its packages; by default this one without them.

        ``visible`` are further folders that programs may read.
        """
        self._limits = limits
        self._isolation = isolation
        self._python, prefixes = _interpreter(python)
        self._visible = (*prefixes, *(os.path.realpath(path) for path in visible))
        self._folder: str | None = None
        self._turn = asyncio.Lock()

    async def run(self, code: str, stdin: str = "") -> Execution:
        """Run a program to its end or its limits. Raises ToolServerError if the sandbox itself fails."""
        async with self._turn, _slot():
            namespaces = await asyncio.to_thread(
                uses_namespaces, self._isolation, "the sandbox", error=ToolServerError
            )
            if self._folder is None:
                self._folder = str(await asyncio.to_thread(scratch_folder, "sandbox"))
            folder = self._folder
            job = Job(
                code=code, stdin=stdin, python=self._python, visible=self._visible, directory=folder,
                namespaces=namespaces, keep_files=True, limits=self._limits.as_dict(),
            )  # fmt: skip
            return await launch(job, self._limits.seconds)

    async def close(self) -> None:
        """Delete the directory. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(discard, folder)


def _slot() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    if loop not in _running:
        _running[loop] = asyncio.Semaphore(max(2, os.cpu_count() or 1))
    return _running[loop]


async def launch(
    job: Job, seconds: float, connect: Callable[[], socket.socket] = LAUNCHER.connect
) -> Execution:
    """Run one program, and keep its files; end it on cancellation, and some time after ``seconds``."""
    reader, writer = await asyncio.open_connection(sock=connect())
    try:
        async with asyncio.timeout(seconds + _GRACE_SECONDS):
            writer.write(encode_job(job))
            await writer.drain()
            answer = read_answer(await reader.read())
        if answer.pop("kept"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(os.path.join(job.directory, "files.new"), os.path.join(job.directory, "files.tar"))
        return Execution(**answer)
    except TimeoutError as error:
        hint = "look for overload of this machine"
        raise ToolServerError("the sandbox did not end its program", hint=hint) from error
    except OSError as error:
        raise ToolServerError(f"the sandbox's launcher ended: {error}") from error
    finally:
        await _disconnect(reader, writer)


async def _disconnect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close the connection; wait until the launcher, if it has not answered, has killed the program."""
    with contextlib.suppress(OSError, TimeoutError):
        if not reader.at_eof():
            writer.write_eof()
            await asyncio.wait_for(reader.read(), _GRACE_SECONDS)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def read_answer(out: bytes) -> dict[str, Any]:
    """Return what the launcher has answered. Raises ToolServerError."""
    try:
        answer: dict[str, Any] = json.loads(out)
    except ValueError as error:
        raise ToolServerError("the sandbox's launcher ended without an answer") from error
    if "error" in answer:
        raise ToolServerError(
            f"the sandbox cannot start a program: {answer['error']}",
            hint="as root, other users must be able to read the interpreter (python: /usr/bin/python3) and to"
            " enter the folder of TMPDIR",
        )
    return answer


def uses_namespaces(isolation: str, where: str, *, error: type[AgentRLError] = ConfigError) -> bool:
    """Return whether programs run in namespaces. Raises ``error`` if they must, and cannot.

    The first answer takes the time of a program: call it in a thread.
    """
    problem = None if isolation == "limits" else namespace_problem()
    if problem is not None and isolation == "namespaces":
        raise error(
            f"{where}: isolation is 'namespaces', and this machine has none: {problem}",
            hint="allow user namespaces (sysctl user.max_user_namespaces), use isolation: docker, or"
            " isolation: auto or limits for programs that you trust",
        )
    return isolation != "limits" and problem is None


@cache
def namespace_problem() -> str | None:
    """Return why programs cannot run in namespaces here; None if they can. Logs the answer once."""
    folder = scratch_folder("sandbox")
    python, prefixes = _interpreter(None)
    job = Job(
        python=python, visible=prefixes, directory=str(folder), namespaces=True,
        limits=SandboxLimits().as_dict(),
    )  # fmt: skip
    try:
        with LAUNCHER.connect() as connection:
            connection.settimeout(_GRACE_SECONDS)
            connection.sendall(encode_job(job))
            answer = read_answer(b"".join(iter(lambda: connection.recv(65536), b"")))
        problem = None if answer["exit_code"] == 0 else answer["stderr"]
    except (OSError, ToolServerError) as error:
        problem = str(error)
    finally:
        discard(folder)
    if problem is not None:
        reads = "" if landlock_version() else ": programs can read what this user can read"
        logger.warning("the sandbox has no namespaces, only limits%s", reads, extra={"why": problem})
    return problem


@cache
def _interpreter(path: str | None) -> tuple[str, tuple[str, ...]]:
    """Return an interpreter and the folders that it needs. Raises ConfigError."""
    if path is None:
        executable = os.path.realpath(sys.executable)
        return executable, (os.path.realpath(sys.base_prefix),)
    report = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
    try:
        done = subprocess.run(
            [path, "-I", "-c", report], capture_output=True, timeout=_GRACE_SECONDS, check=True, text=True
        )
        prefixes = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"python {path!r} of the sandbox does not run: {error}", hint="give the path of an interpreter"
        ) from error
    return os.path.abspath(path), tuple(dict.fromkeys(os.path.abspath(prefix) for prefix in prefixes))
