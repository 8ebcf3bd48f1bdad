"""Define the back end ``docker``: containers of the daemon that Docker's command-line client reaches."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Final

from agentrl.containers.base import (
    COPY_BYTES,
    OUTPUT_BYTES,
    Container,
    ContainerSpec,
    FilesTooLargeError,
    container,
)
from agentrl.containers.docker_client import (
    DockerClient,
    container_name,
    control,
    docker_failed,
    kill_client,
    require_image,
    start_client,
)
from agentrl.errors import ConfigError, ToolServerError
from agentrl.tools.sandbox.limits import Execution

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
        return Execution(
            stdout=client.stdout.text, stderr=client.stderr.text, exit_code=client.code,
            exceeded=client.exceeded or await self._exceeded(client.code), seconds=client.seconds,
            memory_mb=0.0, stdout_bytes=client.stdout.total, stderr_bytes=client.stderr.total,
        )  # fmt: skip

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
