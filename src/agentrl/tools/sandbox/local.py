"""Run programs in the sandbox of this machine, each by a launcher process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

from agentrl.atomic_folder import scratch_folder
from agentrl.errors import ConfigError, ToolServerError
from agentrl.tools.sandbox import landlock
from agentrl.tools.sandbox.launcher_process import LAUNCHER, encode_job
from agentrl.tools.sandbox.limits import Execution, Isolation, SandboxLimits

logger = logging.getLogger(__name__)

_GRACE_SECONDS: Final = 20.0
"""Time beyond a program's own limit for the launcher to start it, end it and keep its files."""

_running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Bounds the programs that run at a time: their time limits are by the clock."""


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
            namespaces = await self._uses_namespaces()
            folder = await self._directory()
            answer = await launch(self._job(code, stdin, folder, namespaces=namespaces), self._limits)
            if answer.pop("kept"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(os.path.join(folder, "files.new"), os.path.join(folder, "files.tar"))
            return Execution(**answer)

    async def close(self) -> None:
        """Delete the directory. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _directory(self) -> str:
        if self._folder is None:
            self._folder = str(await asyncio.to_thread(scratch_folder, "sandbox"))
        return self._folder

    async def _uses_namespaces(self) -> bool:
        if self._isolation == "limits":
            return False
        problem = await asyncio.to_thread(namespace_problem)
        if problem is not None and self._isolation == "namespaces":
            raise ToolServerError(
                f"this machine allows no sandbox in namespaces: {problem}",
                hint="allow user namespaces (sysctl user.max_user_namespaces), use isolation: docker, or"
                " isolation: limits for programs that you trust",
            )
        return problem is None

    def _job(self, code: str, stdin: str, folder: str, *, namespaces: bool) -> dict[str, Any]:
        return {
            "code": code,
            "stdin": stdin,
            "python": self._python,
            "visible": self._visible,
            "directory": folder,
            "namespaces": namespaces,
            "keep_files": True,
            "limits": dataclasses.asdict(self._limits),
        }


def _slot() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    if loop not in _running:
        _running[loop] = asyncio.Semaphore(max(2, os.cpu_count() or 1))
    return _running[loop]


async def launch(job: Mapping[str, Any], limits: SandboxLimits) -> dict[str, Any]:
    """Run one program; end it on cancellation and after a hard time limit."""
    reader, writer = await asyncio.open_connection(sock=LAUNCHER.connect())
    try:
        async with asyncio.timeout(limits.seconds + _GRACE_SECONDS):
            writer.write(encode_job(job))
            await writer.drain()
            return _answer(await reader.read())
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


def _answer(out: bytes) -> dict[str, Any]:
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


@cache
def namespace_problem() -> str | None:
    """Return why programs cannot run in namespaces here; None if they can. Logs the answer once."""
    with tempfile.TemporaryDirectory(prefix="agentrl-sandbox-") as folder:
        python, prefixes = _interpreter(None)
        job = {
            "code": "", "stdin": "", "python": python, "visible": prefixes, "directory": folder,
            "namespaces": True, "keep_files": False, "limits": dataclasses.asdict(SandboxLimits()),
        }  # fmt: skip
        try:
            with LAUNCHER.connect() as connection:
                connection.settimeout(_GRACE_SECONDS)
                connection.sendall(encode_job(job))
                answer = _answer(b"".join(iter(lambda: connection.recv(65536), b"")))
            problem = None if answer["exit_code"] == 0 else answer["stderr"]
        except (OSError, ToolServerError) as error:
            problem = str(error)
    if problem is not None:
        reads = "" if landlock.version() else ": programs can read what this user can read"
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
