"""Define the back end ``docker``: containers of the daemon that Docker's command-line client reaches."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Final

from agentrl.base.concurrency import task_group
from agentrl.base.processes import has_ended, owned_name, owner_of
from agentrl.errors import ConfigError, Dependency, DependencyKind, ToolServerError
from agentrl.worlds.containers.container import (
    COPY_BYTES,
    OUTPUT_BYTES,
    Container,
    ContainerSpec,
    Execution,
    FilesTooLargeError,
    container,
)
from agentrl.worlds.containers.output import Output

logger = logging.getLogger(__name__)

_PREFIX: Final = "agentrl-"
_CONTROL_SECONDS: Final = 120.0
"""Time limit of a command that starts or removes a container; the first one may pull the image."""
_PULL_SECONDS: Final = 1800.0
_GRACE_SECONDS: Final = 10.0
_READ_BYTES: Final = 65536
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
        while pipe is not None and (chunk := await pipe.read(_READ_BYTES)):
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
        raise ConfigError(f"{where}: {what}: {problem}", hint=f"try `docker {shlex.join(words)}`")


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


_START_SECONDS: Final = 120.0
_COPY_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 0.5
_STARTED: Final = b"started\n"
_GUARDED: Final = (
    "echo started; exec 3<&0; cat <&3 >/dev/null 3<&- & c=$!;"
    ' (sleep "$1"; kill -9 $c) >/dev/null 2>&1 & wait $c'
)
"""The first process reaps what commands leave. It ends with the client, or after ``$1`` seconds."""
BEGIN: Final = 'eval "$(head -c "$1")" || exit 1; shift; '
"""Variables come by standard input: arguments stand in process lists and in the audit log of Kubernetes."""
TELLING: Final = 'echo $$; read -r go && exec "$@"'
"""The first process of a command: its id leads the process group that a limit kills. It begins when this id
has been read, so a command that is cancelled before is not left running."""
KILL: Final = "kill -9 -{pid}; kill -9 {pid}"
INTO: Final = 'mkdir -p "$1" && exec tar -xf - -C "$1"'
OUT_OF: Final = '[ -d "$1" ] || exit 44; chmod -R u+rwX "$1" 2>/dev/null; exec tar -cf - -C "$1" .'
NO_FOLDER: Final = 44
CHANGED: Final = "changed as we read it"
"""What tar says, with exit code 1, of files that a process changes meanwhile."""
_OWN_USER: Final = "65533:65533"
_OWN_PROCESSES: Final = 6
"""The four of the first process, and two that end others."""
_FREE: Final = 'stat -f -c "%a %d" "$@"'
_CHUNK: Final = 1 << 20


@container("docker")
class DockerContainer(Container):
    """A container of Docker. It ends when its client does, which ends with this process."""

    def __init__(self, spec: ContainerSpec) -> None:
        super().__init__(spec)
        self._name = ""
        self._client: asyncio.subprocess.Process | None = None
        self._was_out_of_memory = False

    @classmethod
    def check(cls, spec: ContainerSpec, where: str) -> None:
        """Pull or build the image. Raises ConfigError without Docker, or without the image."""
        if spec.image is None and spec.build is None:
            raise ConfigError(f"{where}: the back end 'docker' needs an image", hint="image: NAME")
        if spec.network == "gateway":
            raise ConfigError(
                f"{where}: Docker has no network in which only the gateway is reachable",
                hint="network: host, or a network of Docker in which --gateway_url is reachable",
            )
        require_image(image_of(spec), where, spec.build)

    async def start(self) -> None:
        """Start the container; its client stays."""
        self._name = await asyncio.to_thread(container_name, self.spec.name)
        image = await asyncio.to_thread(image_of, self.spec)
        process = self._client = await start_client(start_arguments(self.spec, self._name, image))
        said = b""
        if process.stdout is not None:
            with contextlib.suppress(TimeoutError):
                said = await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)
        if said != _STARTED:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            _, problem = await asyncio.wait_for(process.communicate(), _START_SECONDS)
            raise docker_failed(
                "run", problem.decode("utf-8", "replace") or f"not within {_START_SECONDS:g} s"
            )

    async def run(
        self,
        command: Sequence[str],
        *,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        output_bytes: int = OUTPUT_BYTES,
        shown_bytes: int | None = None,
    ) -> Execution:
        """Run a command by ``docker exec``. With ``writable``, a folder that it leaves full is its limit."""
        script = exports({**self.spec.environment, **(environment or {})})
        words = ["exec", "--interactive"]
        for flag, value in (("--workdir", workdir), ("--user", user or self.spec.user)):
            words += [] if value is None else [flag, value]
        client = DockerClient(output_bytes, shown_bytes, reads_pid=True)
        try:
            await client.run(
                [*words, self._name, "/bin/sh", "-c", BEGIN + TELLING, "sh", str(len(script)), *command],
                seconds=seconds, script=script, stdin=stdin,
            )  # fmt: skip
        finally:
            if client.code < 0 and client.pid is not None:  # the client was killed, which ends no command
                await asyncio.shield(self._kill(client.pid, user))
        if client.pid is None and client.exceeded is None:
            raise docker_failed("exec", client.stderr.text)
        exceeded = client.exceeded or await self._exceeded(client.code)
        return Execution.of(
            client.stdout, client.stderr, exit_code=client.code, exceeded=exceeded, seconds=client.seconds
        )

    async def _kill(self, pid: int, user: str | None) -> None:
        """Kill a command: as its user where root has no right to."""
        user = (user or self.spec.user or "0") if self.spec.writable else "0"
        line = KILL.format(pid=pid)
        await control("exec", "--user", user, self._name, "/bin/sh", "-c", line, may_fail=True)

    async def _exceeded(self, code: int) -> str | None:
        """Return the limit that ended a command which ended by itself."""
        if code != 0 and not self._was_out_of_memory:
            form = "{{.State.OOMKilled}} {{.State.Running}}"
            killed, is_running = (await control("inspect", "--format", form, self._name)).split()
            if killed == b"true":
                self._was_out_of_memory = True
                return "memory"
            if is_running != b"true":
                raise ToolServerError(f"the container {self._name} has ended", hint="look at Docker's events")
        if self.spec.writable:
            words = ("exec", self._name, "/bin/sh", "-c", _FREE, "sh", *self.spec.writable)
            if b"0" in (await control(*words, may_fail=True)).split():
                return "files"
        return None

    async def copy(
        self, archive: Path, *, into: str | None = None, out_of: str | None = None, limit: int = COPY_BYTES
    ) -> None:
        """Copy by ``tar`` in the container, as root or, with ``writable``, as the container's user."""
        user = (self.spec.user or "0") if self.spec.writable else "0"
        line = INTO if out_of is None else OUT_OF
        shell = (self._name, "/bin/sh", "-c", line, "sh", str(into or out_of))
        words = ["exec", "--interactive", "--user", user, *shell]
        file = await asyncio.to_thread(open, archive, "rb" if out_of is None else "wb")
        with file:
            code, said = await self._transfer(words, file, is_out=out_of is not None, limit=limit)
        if code == NO_FOLDER and out_of is not None:
            raise FileNotFoundError(f"the container of {self.spec.name} has no folder {out_of}")
        if code != 0 and not (code == 1 and CHANGED in said):
            raise docker_failed("exec tar", said)

    async def _transfer(
        self, words: list[str], file: IO[bytes], *, is_out: bool, limit: int
    ) -> tuple[int | None, str]:
        """Run a client with ``file`` as its input or output; return its exit code and what it says."""
        nothing = asyncio.subprocess.DEVNULL
        stdin, stdout = (nothing, file) if is_out else (file, nothing)
        process = await start_client(words, stdin=stdin, stdout=stdout)
        said = asyncio.create_task(process.communicate())
        deadline = time.monotonic() + _COPY_SECONDS
        try:
            while not (await asyncio.wait([said], timeout=_LOOK_SECONDS))[0]:
                if is_out and os.fstat(file.fileno()).st_size > limit:
                    break
                if time.monotonic() > deadline:
                    raise ToolServerError(f"docker copied no files within {_COPY_SECONDS:g} s")
            if is_out and os.fstat(file.fileno()).st_size > limit:
                raise FilesTooLargeError(
                    f"files of the container of {self.spec.name} have more than {limit:,} bytes"
                )
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.wait([said], timeout=_LOOK_SECONDS)
        return process.returncode, said.result()[1].decode("utf-8", "replace")

    async def stop(self) -> None:
        """Remove the container."""
        name, self._name = self._name, ""
        client, self._client = self._client, None
        if client is not None:
            await kill_client(client)
            await control("rm", "--force", "--volumes", name, may_fail=True)


def exports(variables: Mapping[str, str], *more: str) -> bytes:
    """Return the shell script that sets ``variables`` and runs the lines ``more``, for ``BEGIN``."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "".join(f"{line}\n" for line in (*lines, *more, ":")).encode("utf-8", "surrogateescape")


def start_arguments(spec: ContainerSpec, name: str, image: str) -> list[str]:
    """Return the arguments of ``docker run``. Variables and the user of the spec are those of commands.

    With ``writable`` the first process has a user of its own, so that commands cannot kill it.
    """
    user = _OWN_USER if spec.writable else spec.user
    return [
        "run", "--interactive", "--name", name, "--log-driver", "none",
        *([] if user is None else ["--user", user]), *limit_arguments(spec),
        "--entrypoint", "/bin/sh", image, "-c", _GUARDED, "sh", f"{spec.seconds:.0f}",
    ]  # fmt: skip


def limit_arguments(spec: ContainerSpec) -> list[str]:
    """Return the arguments of ``docker run`` for the rights and limits of a container."""
    words = [
        "--network", spec.network, "--memory", f"{spec.memory_mb}m", "--memory-swap", f"{spec.memory_mb}m",
        "--pids-limit", str(spec.processes + _OWN_PROCESSES),
        "--ulimit", f"nofile={spec.open_files}", "--ulimit", f"fsize={spec.storage_mb << 20}",
        "--ulimit", "core=0",
    ]  # fmt: skip
    words += [] if spec.workdir is None else ["--workdir", spec.workdir]
    words += [] if spec.cpus is None else ["--cpus", str(spec.cpus)]
    words += [] if spec.cpu_seconds is None else ["--ulimit", f"cpu={spec.cpu_seconds}"]
    if spec.writable:
        user, _, group = (spec.user or "0").partition(":")
        # The owner is named because some versions of runc replace the mode by that of the image's folder.
        size = f"size={spec.storage_mb}m,nr_inodes={spec.files},uid={user},gid={group or user},mode=1777,exec"
        words += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        words += [word for folder in spec.writable for word in ("--tmpfs", f"{folder}:{size}")]
    return words


def image_of(spec: ContainerSpec) -> str:
    """Return the name of the image; one that is built here is named by the digest of its folder. Blocks."""
    return str(spec.image) if spec.build is None else f"agentrl-built:{_digest(os.path.realpath(spec.build))}"


@cache
def _digest(folder: str) -> str:
    digest = hashlib.blake2b(digest_size=10)
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(parent, name)
            status = os.lstat(path)
            digest.update(
                f"{os.path.relpath(path, folder)}\0{status.st_mode:o}\0".encode("utf-8", "surrogateescape")
            )
            if os.path.islink(path):
                digest.update(os.fsencode(os.readlink(path)))
            else:
                with open(path, "rb") as source:
                    while chunk := source.read(_CHUNK):
                        digest.update(chunk)
    return digest.hexdigest()
