"""Run Docker's command-line client, and remove the containers that killed processes left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from typing import IO, Final

from agentrl.concurrency import task_group
from agentrl.errors import ConfigError, Dependency, DependencyKind, ToolServerError
from agentrl.processes import has_ended, owned_name, owner_of
from agentrl.tools.sandbox.launcher import Output

logger = logging.getLogger(__name__)

_PREFIX: Final = "agentrl-"
_CONTROL_SECONDS: Final = 120.0
"""Time limit of a command that starts or removes a container; the first one may pull the image."""
_PULL_SECONDS: Final = 1800.0
_GRACE_SECONDS: Final = 10.0
_CHUNK: Final = 65536
_HINT: Final = "install and start Docker, or choose another isolation"
_AWAY: Final = (
    "Cannot connect to the Docker daemon",
    "error during connect",
    "failed to connect to the docker",
)
"""What the client says of a daemon that is away."""


class _TooMuchOutputError(Exception):
    """An output of a command has reached its limit."""


class DockerClient:
    """One command of Docker's client: its outputs, and the limit that ended it, time or output."""

    def __init__(self, output_bytes: int, shown_bytes: int | None = None, *, reads_pid: bool = False) -> None:
        """Each output may have ``output_bytes``; its two ends are kept as ``shown_bytes``, None keeps all.

        With ``reads_pid`` the first line of standard output is the id of a process, ``pid``, which begins
        when it has read a line: one whose id is not known yet has not begun, and need not be killed.
        """
        self.pid: int | None = None
        self._has_pid = asyncio.Event()
        self._reads_pid = reads_pid
        self.stdout, self.stderr = (Output.of(output_bytes, shown_bytes) for _ in range(2))
        self.exceeded: str | None = None
        self.code = -int(signal.SIGKILL)
        self.seconds = 0.0

    async def run(
        self,
        words: Sequence[str],
        *,
        seconds: float,
        script: bytes = b"",
        stdin: bytes = b"",
    ) -> None:
        """Run ``docker`` with ``words`` to its end or a limit. Raises ToolServerError if it does not end.

        With ``reads_pid`` the command reads ``script`` before it prints its id, and ``stdin`` after it.
        """
        started = time.monotonic()
        process = await start_client(words)
        try:
            await self._exchange(process, script, stdin, seconds)
            if self.exceeded is None:
                self.code = await asyncio.wait_for(process.wait(), _CONTROL_SECONDS)
        except TimeoutError as error:
            raise ToolServerError("the client of docker closed its outputs and did not end") from error
        finally:
            await kill_client(process)
        self.seconds = time.monotonic() - started

    async def _exchange(
        self, process: asyncio.subprocess.Process, script: bytes, stdin: bytes, seconds: float
    ) -> None:
        """Write the input and read the outputs, to their ends or to a limit: ``exceeded``."""
        try:
            async with asyncio.timeout(seconds), task_group() as pipes:
                pipes.create_task(self._read(process.stdout, self.stdout))
                pipes.create_task(self._read(process.stderr, self.stderr))
                pipes.create_task(self._feed(process.stdin, script, stdin))
        except _TooMuchOutputError:
            self.exceeded = "output"
        except TimeoutError:
            self.exceeded = "time"

    async def _read(self, pipe: asyncio.StreamReader | None, output: Output) -> None:
        """Read to the end. Raises _TooMuchOutputError at the limit."""
        if self._reads_pid and pipe is not None and output is self.stdout:
            line = (await pipe.readline()).strip()
            self.pid = int(line) if line.isdigit() else None
            self._has_pid.set()
        while pipe is not None and (chunk := await pipe.read(_CHUNK)):
            if not output.add(chunk):
                raise _TooMuchOutputError

    async def _feed(self, pipe: asyncio.StreamWriter | None, script: bytes, text: bytes) -> None:
        """Write the command's input. A command that does not read it is not an error."""
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.write(script)
                await pipe.drain()
                if self._reads_pid:
                    await self._has_pid.wait()
                    pipe.write(b"\n")
                pipe.write(text)
                await pipe.drain()
            pipe.close()


async def control(*words: str, may_fail: bool = False) -> bytes:
    """Return what a command of Docker prints. Raises ToolServerError if it is too slow, or fails."""
    process = await start_client(words)
    try:
        async with asyncio.timeout(_CONTROL_SECONDS):
            said, problem = await process.communicate()
    except TimeoutError as error:
        raise ToolServerError(f"docker {words[0]} took longer than {_CONTROL_SECONDS:g} s") from error
    finally:
        await kill_client(process)
    if process.returncode != 0 and not may_fail:
        raise docker_failed(words[0], problem.decode("utf-8", "replace"))
    return said


def docker_failed(command: str, said: str) -> ToolServerError:
    """Return the error for a command of Docker that failed: an outage if the daemon is away."""
    away = Dependency(DependencyKind.CONTAINERS, "docker") if any(text in said for text in _AWAY) else None
    return ToolServerError(f"docker {command} failed: {said.strip()[-500:]}", hint=_HINT, outage=away)


async def start_client(
    words: Sequence[str],
    *,
    stdin: int | IO[bytes] = asyncio.subprocess.PIPE,
    stdout: int | IO[bytes] = asyncio.subprocess.PIPE,
) -> asyncio.subprocess.Process:
    """Start the client of Docker, with the variables of this process and no others.

    What a container's commands get must not reach the client: ``LD_PRELOAD`` or ``HTTPS_PROXY`` of a task
    would run its code here, or send the client elsewhere.
    """
    docker = shutil.which("docker")
    if docker is None:
        raise ToolServerError("the sandbox needs docker, and there is none on PATH", hint=_HINT)
    return await asyncio.create_subprocess_exec(
        docker,
        *words,
        stdin=stdin,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
    )


async def kill_client(process: asyncio.subprocess.Process) -> None:
    """Kill the client of Docker and read what is left of its outputs, without which it does not end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), _GRACE_SECONDS)


def container_name(kind: str) -> str:
    """Return a new name for a container; its end says which process made it.

    The first name of a process removes the containers of processes of this machine that have ended; those of
    other machines and pid namespaces stay. That may take a while: call it in a thread.
    """
    _remove_containers_of_ended()
    return owned_name(f"{_PREFIX}{kind}")


@cache
def _remove_containers_of_ended() -> None:
    """Remove what no living process owns. A Docker that does not answer is left to the next command."""
    try:
        listed = _ask("ps", "--all", "--filter", f"name={_PREFIX}", "--format", "{{.Names}}").stdout.split()
        owners = {name: owner_of(name) for name in listed if name.startswith(_PREFIX)}
        left = [name for name, owner in owners.items() if owner is not None and has_ended(owner)]
        if left:
            _ask("rm", "--force", "--volumes", *left)
            logger.info("removed %d containers, left by processes that were killed: %s", len(left), left[0])
    except FileNotFoundError:
        return
    except subprocess.TimeoutExpired as error:
        logger.warning("docker %s took longer than %g s", error.cmd[1], error.timeout)


def require_image(image: str, where: str, build: str | None = None) -> None:
    """Pull an image that this machine does not have, or ``build`` it from a folder.

    Raises ConfigError if there is no Docker or no image.
    """
    if _problem(where, "version", "--format", "{{.Server.Version}}") is not None:
        raise ConfigError(
            f"{where}: no Docker daemon answers",
            hint="start it, let this user reach it, or use another isolation",
        )
    if _problem(where, "image", "inspect", image) is None:
        return
    words = ("pull", "--quiet", image) if build is None else ("build", "--quiet", "--tag", image, build)
    problem = _problem(where, *words, seconds=_PULL_SECONDS)
    if problem is not None:
        what = f"the image {image!r} cannot be pulled" if build is None else f"{build} cannot be built"
        raise ConfigError(f"{where}: {what}: {problem}", hint=f"try `docker {' '.join(words)}`")


def _problem(where: str, *words: str, seconds: float = _CONTROL_SECONDS) -> str | None:
    """Run a command of Docker; return what it says if it fails. Raises ConfigError without Docker."""
    try:
        done = _ask(*words, seconds=seconds)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{where}: there is no command 'docker'", hint="install Docker, or use another isolation"
        ) from error
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:g} s"
    return None if done.returncode == 0 else done.stderr.strip()[-500:] or f"exit code {done.returncode}"


def _ask(*words: str, seconds: float = _CONTROL_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a command of Docker. Raises FileNotFoundError without Docker, and TimeoutExpired."""
    return subprocess.run(
        ["docker", *words], capture_output=True, text=True, errors="replace", timeout=seconds, check=False
    )
