"""Run the commands of one trajectory in Docker: a container for each, on one working directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from agentrl.documents.record import CommandRun, Ending
from agentrl.errors import ToolServerError
from agentrl.harness.command import arguments_of
from agentrl.harness.config import Command, HarnessConfig, HarnessLimits
from agentrl.harness.prepare import Prepared
from agentrl.harness.session import SHOWN_BYTES, Session, command_ending, hide
from agentrl.harness.workspace import HOME, TEMPORARY, WORKSPACE, make_readable, pack, unpack
from agentrl.tools.sandbox.container_names import container_name

T = TypeVar("T")

ROOT: Final = "/sandbox"
"""The folder of the files in the container."""
_CONTROL_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5
_USER: Final = 1000
"""The user of the container where the sampler is root."""
_CHUNK: Final = 65536
OWN_TO_DOCKER: Final = ("PATH", "HOME", "TMPDIR")
"""Variables that the client of Docker keeps for itself; the values for the container are arguments."""
_DOCKER_FAILED: Final = 125
"""Exit code of a client that could not run the container."""
_BLOCK: Final = 512
_GUARDED: Final = 'exec 3<&0; (cat <&3 >/dev/null; kill -9 -1) & "$@" </dev/null 3<&-; exit $?'
"""The first process of a container: it ends the others when its standard input, the client, ends."""


class ContainerSession(Session):
    """The working directory of one trajectory, which Docker mounts into a container for each command."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._user = _USER if os.getuid() == 0 else os.getuid()

    @property
    def root(self) -> str:
        """The folder of the files, as commands see it."""
        return ROOT

    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it: the one that it advertises."""
        return url

    async def run(
        self,
        command: Command,
        environment: Mapping[str, str],
        *,
        seconds: float,
        secrets: Sequence[str] = (),
        calls_model: bool = True,
    ) -> CommandRun:
        """Run a command in a container; see ``Session.run``.

        The files of a command that leaves more than ``disk_mb`` or ``files`` are dropped.
        """
        config = self._prepared.config
        name = await asyncio.to_thread(container_name, "harness")
        folder = self._folder / name
        await _files(unpack, self.archive, folder, self._user)
        network = config.network if calls_model else "none"
        words = run_arguments(config, name, folder, self._user, environment, network=network)
        running = _Running(name, folder, config.limits)
        out_of_memory = False
        try:
            await running.run([*words, *arguments_of(command)], environment, seconds)
            out_of_memory = running.exceeded is None and await _ran_out_of_memory(name)
        finally:
            await asyncio.shield(_remove(name))
        await _files(make_readable, folder)
        if await _files(_is_too_large, folder, config.limits):
            running.exceeded = running.exceeded or Ending.DISK_LIMIT
        else:
            await _files(pack, folder, self.archive)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        ended = Ending.MEMORY_LIMIT if out_of_memory else running.exceeded or command_ending(running.code)
        out, err = (hide(output.text, secrets) for output in (running.stdout, running.stderr))
        return CommandRun(
            ended=ended, exit_code=running.code, seconds=running.seconds, memory_mb=0.0,
            stdout=out, stderr=err, stdout_bytes=running.stdout.size, stderr_bytes=running.stderr.size,
        )  # fmt: skip


def run_arguments(
    config: HarnessConfig, name: str, folder: Path, user: int, variables: Mapping[str, str], *, network: str
) -> list[str]:
    """Return the arguments of ``docker`` before the command, with the values of ``OWN_TO_DOCKER`` only."""
    limits = config.limits
    size = f"size={limits.disk_mb}m,nr_inodes={limits.files},mode=1777,exec"
    own = {"HOME": f"{ROOT}/{HOME}", "TMPDIR": f"{ROOT}/{TEMPORARY}"}
    own |= {name: value for name, value in variables.items() if name in OWN_TO_DOCKER}
    shown = [*(f"{name}={value}" for name, value in own.items()), *(variables.keys() - own.keys())]
    named = [word for variable in sorted(shown) for word in ("--env", variable)]
    return [
        "run", "--interactive", "--name", name, "--network", network, "--user", f"{user}:{user}",
        "--read-only", "--tmpfs", f"/tmp:{size}", "--tmpfs", f"/var/tmp:{size}", "--log-driver", "none",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        "--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m",
        "--pids-limit", str(limits.processes), "--ulimit", f"nofile={limits.open_files}",
        "--ulimit", f"cpu={limits.cpu_seconds}", "--ulimit", f"fsize={limits.disk_mb << 20}",
        "--ulimit", "core=0", "--mount", f"type=bind,source={folder},target={ROOT}",
        "--workdir", f"{ROOT}/{WORKSPACE}", *named, "--entrypoint", "/bin/sh",
        str(config.image), "-c", _GUARDED, "sh",
    ]  # fmt: skip


@dataclass
class _Output:
    """The first and the last bytes of a stream."""

    size: int = 0
    _first: bytearray = field(default_factory=bytearray)
    _last: bytearray = field(default_factory=bytearray)

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        half = SHOWN_BYTES // 2
        room = half - len(self._first)
        self._first += chunk[:room]
        self._last = (self._last + chunk[room:])[-half:]

    @property
    def text(self) -> str:
        left_out = self.size - len(self._first) - len(self._last)
        gap = f"\n[{left_out:,} bytes left out]\n".encode() if left_out else b""
        return (self._first + gap + self._last).decode("utf-8", "replace")


class _Running:
    """One command in a container: its outputs, and the limit that ended it."""

    def __init__(self, name: str, folder: Path, limits: HarnessLimits) -> None:
        self._name = name
        self._folder = folder
        self._limits = limits
        self.stdout, self.stderr = _Output(), _Output()
        self.exceeded: Ending | None = None
        self.code = -int(signal.SIGKILL)
        self.seconds = 0.0

    async def run(self, words: Sequence[str], variables: Mapping[str, str], seconds: float) -> None:
        """Run the client of Docker. Raises ToolServerError if Docker itself fails."""
        started = time.monotonic()
        process = await _start(words, variables)
        reading = asyncio.create_task(self._read_both(process), name=f"outputs of {self._name}")
        watching = asyncio.create_task(self._watch(seconds), name=f"limits of {self._name}")
        try:
            await asyncio.wait([reading, watching], return_when=asyncio.FIRST_COMPLETED)
            if self.exceeded is None:
                self.code = await asyncio.wait_for(process.wait(), _CONTROL_SECONDS)
        except TimeoutError as error:
            raise ToolServerError("the client of docker closed its outputs and did not end") from error
        finally:
            for task in (watching, reading):
                task.cancel()
            await asyncio.gather(watching, reading, return_exceptions=True)
            await _kill(process)
        self.seconds = time.monotonic() - started
        if self.code == _DOCKER_FAILED:
            raise ToolServerError(
                f"docker run failed: {self.stderr.text.strip()[-500:]}", hint="try `docker run` by hand"
            )

    async def _watch(self, seconds: float) -> None:
        """Return when a limit is reached."""
        end = time.monotonic() + seconds
        while self.exceeded is None:
            await asyncio.sleep(min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))
            if time.monotonic() >= end:
                self.exceeded = Ending.TIME_LIMIT
            elif await asyncio.to_thread(_is_too_large, self._folder, self._limits):
                self.exceeded = Ending.DISK_LIMIT

    async def _read_both(self, process: asyncio.subprocess.Process) -> None:
        outputs = ((process.stdout, self.stdout), (process.stderr, self.stderr))
        await asyncio.gather(*(self._read(pipe, output) for pipe, output in outputs))

    async def _read(self, pipe: asyncio.StreamReader | None, output: _Output) -> None:
        """Read to the end, or to the limit, which ends the watch."""
        while pipe is not None and self.exceeded is None and (chunk := await pipe.read(_CHUNK)):
            output.add(chunk)
            if output.size > self._limits.output_bytes:
                self.exceeded = Ending.OUTPUT_LIMIT


def _is_too_large(folder: Path, limits: HarnessLimits) -> bool:
    """Return whether the files of a folder exceed ``disk_mb`` or ``files``."""
    size = count = 0
    for place, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        for name in files:
            with suppress(OSError):
                found = os.lstat(os.path.join(place, name))
                size += max(found.st_size, found.st_blocks * _BLOCK)  # a sparse file is whole in an archive
        if size > limits.disk_mb << 20 or count > limits.files:
            return True
    return False


async def _files(work: Callable[..., T], *arguments: Any) -> T:
    """Do work on the files of a harness in a thread. Raises ToolServerError if it cannot be done."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except (OSError, tarfile.TarError) as error:
        raise ToolServerError(f"the files of the harness cannot be moved: {error}") from error


async def _ran_out_of_memory(name: str) -> bool:
    return (await _control("inspect", "--format", "{{.State.OOMKilled}}", name)).strip() == b"true"


async def _remove(name: str) -> None:
    """Kill what runs in the container, and remove it."""
    await _control("rm", "--force", "--volumes", name)


async def _control(*words: str) -> bytes:
    """Return what a command of Docker prints. Raises ToolServerError if it does not end."""
    process = await _start(words, {})
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _CONTROL_SECONDS)
    except TimeoutError as error:
        raise ToolServerError(f"docker {words[0]} took longer than {_CONTROL_SECONDS:g} s") from error
    finally:
        await _kill(process)
    return said


async def _start(words: Sequence[str], variables: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start the client of Docker, which takes the values of variables from its own environment."""
    docker = shutil.which("docker")
    if docker is None:
        raise ToolServerError("the harness needs docker, and PATH has none", hint="install Docker")
    pipe = asyncio.subprocess.PIPE
    shown = {name: value for name, value in variables.items() if name not in OWN_TO_DOCKER}
    return await asyncio.create_subprocess_exec(
        docker, *words, env={**os.environ, **shown}, stdin=pipe, stdout=pipe, stderr=pipe
    )


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the client of Docker and read what is left of its outputs, without which it does not end."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), _CONTROL_SECONDS)
