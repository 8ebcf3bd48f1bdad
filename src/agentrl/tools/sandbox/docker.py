"""Run programs in Docker: each trajectory has a container without a network and with limits."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Sequence
from typing import Final

from agentrl.errors import ToolServerError
from agentrl.tools.sandbox.container_names import container_name
from agentrl.tools.sandbox.limits import Execution, SandboxLimits

_CONTROL_SECONDS: Final = 120.0
"""Time limit of a command that starts or removes a container; the first one may pull the image."""
_GRACE_SECONDS: Final = 10.0
_SIGNALLED: Final = 128
"""Exit codes above this name a signal."""
_SIGKILL: Final = 9
_FIRST_PROCESS: Final = (
    "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
)
"""Keeps the container alive, and reaps what programs leave behind."""
_USER: Final = 65534
_CHUNK: Final = 65536
_HINT: Final = "install and start Docker, or choose another isolation"


class DockerSandbox:
    """A container, and programs that run in it one after the other."""

    def __init__(self, limits: SandboxLimits, *, image: str) -> None:
        """``image`` needs ``python3`` and coreutils' ``timeout``."""
        self._limits = limits
        self._image = image
        self._name: str | None = None
        self._turn = asyncio.Lock()

    async def run(self, code: str, stdin: str = "") -> Execution:
        """Run a program to its end or its limits. Raises ToolServerError if Docker fails.

        After one that fills or locks its directory, or leaves processes that block the container, the next
        one begins in a new container.
        """
        async with self._turn:
            name = await self._container()
            try:
                await self._write(name, code)
            except ToolServerError:
                await self._remove()
                name = await self._container()
                await self._write(name, code)
            done = await self._execute(name, stdin)
            try:
                await self._end_all(name)
            except ToolServerError:
                await self._remove()
            return done

    async def close(self) -> None:
        """Remove the container. Idempotent."""
        with contextlib.suppress(ToolServerError):
            await self._remove()

    def start_command(self, name: str) -> list[str]:
        """Return the arguments of ``docker`` that start the container."""
        return [
            "run", "--detach", "--name", name, *container_limits(self._limits, network="none"),
            "--env", "PYTHONDONTWRITEBYTECODE=1", "--env", "PYTHONUNBUFFERED=1",
            self._image, "python3", "-c", _FIRST_PROCESS,
        ]  # fmt: skip

    async def _container(self) -> str:
        if self._name is None:
            name = await asyncio.to_thread(container_name, "sandbox")
            await _docker(*self.start_command(name))
            self._name = name
        return self._name

    async def _remove(self) -> None:
        name, self._name = self._name, None
        if name is not None:
            await _docker("rm", "--force", "--volumes", name)

    async def _write(self, name: str, code: str) -> None:
        write = "rm -rf main.py && cat > main.py"
        text = code.encode("utf-8", "surrogatepass")
        await _docker("exec", "--interactive", name, "sh", "-c", write, stdin=text)

    async def _end_all(self, name: str) -> None:
        """Kill what the program left running; the container's first process stays."""
        await _docker("exec", name, "sh", "-c", "kill -9 -1 2>/dev/null; true")

    async def _execute(self, name: str, stdin: str) -> Execution:
        limits = self._limits
        command = (
            "exec", "--interactive", name,
            "timeout", "--signal=KILL", f"{limits.seconds:g}", "python3", "-s", "main.py",
        )  # fmt: skip
        started = time.monotonic()
        process = await _start(command)
        outputs = [bytearray(), bytearray()]
        code, exceeded = -_SIGKILL, None
        try:
            async with asyncio.timeout(limits.seconds + _GRACE_SECONDS):
                complete = await asyncio.gather(
                    *(
                        _read(process, pipe, output, limits.output_bytes)
                        for pipe, output in zip((process.stdout, process.stderr), outputs, strict=True)
                    ),
                    _feed(process, stdin.encode("utf-8", "surrogatepass")),
                )
                exceeded = None if all(complete) else "output"
                if exceeded is None:
                    code = _exit_code(await process.wait())
        except TimeoutError:
            exceeded = "time"
        finally:
            await _kill(process)
        seconds = time.monotonic() - started
        if exceeded is None and code == -_SIGKILL:
            exceeded = "time" if seconds >= limits.seconds else "memory"
        return Execution(
            stdout=outputs[0].decode("utf-8", "replace"),
            stderr=outputs[1].decode("utf-8", "replace"),
            exit_code=code,
            exceeded=exceeded,
            seconds=seconds,
            memory_mb=0.0,
        )


def container_limits(limits: SandboxLimits, *, network: str) -> list[str]:
    """Return the arguments of ``docker run`` for a container that is removed at its end, with ``limits``.

    Programs may write to ``/work``, where they start, and to ``/tmp``; both are in memory.
    """
    # The owner is named because some versions of runc replace the mode by that of the image's folder.
    size = f"size={limits.disk_mb}m,nr_inodes={limits.files},uid={_USER},gid={_USER},mode=1777,exec"
    return [
        "--rm", "--network", network, "--read-only",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{_USER}:{_USER}",
        "--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m",
        "--pids-limit", str(limits.processes + 4), "--cpus", "1",
        "--ulimit", f"nofile={limits.open_files}", "--ulimit", "core=0",
        "--ulimit", f"cpu={limits.cpu_seconds}", "--ulimit", f"fsize={limits.disk_mb << 20}",
        "--tmpfs", f"/work:{size}", "--tmpfs", f"/tmp:{size}", "--workdir", "/work", "--env", "HOME=/work",
    ]  # fmt: skip


async def _docker(*arguments: str, stdin: bytes = b"") -> None:
    """Run a command of ``docker``. Raises ToolServerError if it fails."""
    process = await _start(arguments)
    try:
        async with asyncio.timeout(_CONTROL_SECONDS):
            _, problem = await process.communicate(stdin)
    except TimeoutError as error:
        raise ToolServerError(f"docker {arguments[0]} took longer than {_CONTROL_SECONDS:g} s") from error
    finally:
        await _kill(process)
    if process.returncode != 0:
        text = problem.decode("utf-8", "replace").strip()
        raise ToolServerError(f"docker {arguments[0]} failed: {text[-500:]}", hint=_HINT)


async def _start(arguments: Sequence[str]) -> asyncio.subprocess.Process:
    docker = shutil.which("docker")
    if docker is None:
        raise ToolServerError("the sandbox needs docker, and there is none on PATH", hint=_HINT)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(docker, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a command of ``docker`` and read what is left of its output, without which it does not end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), _GRACE_SECONDS)


async def _read(
    process: asyncio.subprocess.Process, pipe: asyncio.StreamReader | None, output: bytearray, limit: int
) -> bool:
    """Keep the first ``limit`` bytes; kill the process if there are more, and return False then."""
    complete = True
    while pipe is not None and (chunk := await pipe.read(_CHUNK)):
        output += chunk[: limit + 1 - len(output)]
        if complete and len(output) > limit:
            complete = False
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    del output[limit:]
    return complete


async def _feed(process: asyncio.subprocess.Process, text: bytes) -> bool:
    """Write the program's input. A program that does not read it is not an error."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(text)
            await process.stdin.drain()
        process.stdin.close()
    return True


def _exit_code(code: int) -> int:
    """Return minus the signal for the exit code of a program that a signal ended."""
    return code if code <= _SIGNALLED else _SIGNALLED - code
