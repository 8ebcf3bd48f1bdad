"""Run a model's programs in a container, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from typing import Final

from agentrl.errors import ToolServerError
from agentrl.worlds.containers.container import Container, ContainerSpec
from agentrl.worlds.containers.docker import DockerContainer
from agentrl.worlds.sandbox.limits import Execution, SandboxLimits
from agentrl.worlds.sandbox.program import MAIN

_WORK: Final = "/work"
_USER: Final = "65534:65534"
_LIFE_SECONDS: Final = 86400.0
_CONTROL_SECONDS: Final = 120.0
_WRITE: Final = f"rm -rf {MAIN} && cat > {MAIN}"
_SIGNALLED: Final = 128
"""Exit codes above this name a signal."""
_VARIABLES: Final = {"HOME": _WORK, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


def program_container(limits: SandboxLimits, image: str, *, network: str = "none") -> ContainerSpec:
    """Return a container without rights: programs start in ``/work``, and write there and to ``/tmp``."""
    return ContainerSpec(
        name="sandbox", image=image, environment=_VARIABLES, workdir=_WORK, user=_USER,
        writable=(_WORK, "/tmp"), network=network, cpus=1.0, memory_mb=limits.memory_mb,
        storage_mb=limits.disk_mb, files=limits.files, processes=limits.processes,
        open_files=limits.open_files, cpu_seconds=limits.cpu_seconds, seconds=_LIFE_SECONDS,
    )  # fmt: skip


class ContainerSandbox:
    """A container of Docker, and programs that run in it one after the other."""

    def __init__(self, limits: SandboxLimits, *, image: str) -> None:
        """``image`` needs ``python3`` and ``sh``."""
        self._limits = limits
        self._spec = program_container(limits, image)
        self._container: Container | None = None
        self._turn = asyncio.Lock()

    async def run(self, code: str, stdin: str = "") -> Execution:
        """Run a program to its end or its limits. Raises ToolServerError if the container fails.

        After one that fills or locks its directory, or leaves processes that block the container, the next
        one begins in a new container.
        """
        limits = self._limits
        text = code.encode("utf-8", "surrogatepass")
        async with self._turn:
            try:
                container = await self._written(text)
            except ToolServerError:
                if self._container is None:  # it does not start
                    raise
                await self.close()
                container = await self._written(text)
            done = await container.run(
                ("python3", "-s", MAIN), seconds=limits.seconds, output_bytes=limits.output_bytes,
                stdin=stdin.encode("utf-8", "surrogatepass"),
            )  # fmt: skip
            try:  # kill what the program left running; the container's first process has another user
                await self._shell(container, "kill -9 -1; true")
            except ToolServerError:
                await self.close()
        exit_code = done.exit_code if done.exit_code <= _SIGNALLED else _SIGNALLED - done.exit_code
        exceeded = done.exceeded or ("memory" if exit_code == -signal.SIGKILL else None)
        return dataclasses.replace(done, exit_code=exit_code, exceeded=exceeded)

    async def close(self) -> None:
        """Remove the container. Idempotent."""
        container, self._container = self._container, None
        if container is not None:
            with contextlib.suppress(ToolServerError):
                await container.stop()

    async def _written(self, code: bytes) -> Container:
        """Return the container, started, with the program in it. Raises ToolServerError."""
        if self._container is None:
            self._container = await DockerContainer(self._spec).__aenter__()
        await self._shell(self._container, _WRITE, code)
        return self._container

    async def _shell(self, container: Container, line: str, stdin: bytes = b"") -> None:
        done = await container.run(("sh", "-c", line), seconds=_CONTROL_SECONDS, stdin=stdin)
        if not done.succeeded:
            why = done.stderr.strip()[-300:] or done.exceeded or f"exit code {done.exit_code}"
            raise ToolServerError(f"the container of the sandbox cannot run {line!r}: {why}")
