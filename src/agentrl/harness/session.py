"""Run the commands of one trajectory on one working directory: in this machine's sandbox, or in Docker."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import tarfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from agentrl.atomic_folder import scratch_folder
from agentrl.documents.record import CommandRun
from agentrl.errors import ConfigError, ToolServerError
from agentrl.harness.config import Command, HarnessConfig, HarnessLimits
from agentrl.harness.prepare import SYSTEM_PATH, Prepared, arguments_of
from agentrl.harness.workspace import HOME, TEMPORARY, WORKSPACE, add_files, make_readable, pack, unpack
from agentrl.processes import process_tree
from agentrl.tools.sandbox.docker import OWN_TO_DOCKER, DockerClient, container_name, control, limit_arguments
from agentrl.tools.sandbox.limits import Execution
from agentrl.tools.sandbox.local import launch, uses_namespaces
from agentrl.tools.sandbox.namespaces import LOOPBACK, WORK
from agentrl.tools.sandbox.program import Job

logger = logging.getLogger(__name__)

SHOWN_BYTES: Final = 64 << 10
"""Bytes of each output that are kept."""
_MARKER: Final = "AGENTRL_HARNESS"
_HTTP_PORT: Final = 80
T = TypeVar("T")

_USER: Final = 1000
"""The user of the container where the sampler is root."""
_BLOCK: Final = 512
_GUARDED: Final = 'exec 3<&0; (cat <&3 >/dev/null; kill -9 -1) & "$@" </dev/null 3<&-; exit $?'
"""The first process of a container: it ends the others when its standard input, the client, ends."""


class Session(ABC):
    """The commands of one trajectory. ``archive`` holds its files, ``before`` those of its beginning."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._folder = Path()

    async def __aenter__(self) -> Self:
        self._folder = await asyncio.to_thread(scratch_folder, "harness")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def archive(self) -> Path:
        """The files of the trajectory."""
        return self._folder / "files.tar"

    @property
    def before(self) -> Path:
        """The files with which it began."""
        return self._folder / "before.tar"

    @property
    @abstractmethod
    def root(self) -> str:
        """The folder of the files, as commands see it."""

    @abstractmethod
    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it."""

    async def run(
        self,
        command: Command,
        environment: Mapping[str, str],
        *,
        seconds: float,
        secrets: Sequence[str] = (),
        calls_model: bool = True,
    ) -> CommandRun:
        """Run a command to its end or to a limit. ``secrets`` are hidden in its output.

        Without ``calls_model`` it cannot reach the gateway, where it has a network of its own. On
        cancellation it is killed with all that it started. Raises ToolServerError if the sandbox fails.
        """
        done = await self._execute(command, environment, seconds, calls_model)
        run = done.as_command_run
        return dataclasses.replace(run, stdout=hide(run.stdout, secrets), stderr=hide(run.stderr, secrets))

    @abstractmethod
    async def _execute(
        self, command: Command, environment: Mapping[str, str], seconds: float, calls_model: bool
    ) -> Execution:
        """Run a command for ``run``."""

    async def fill(self, files: Mapping[str, bytes]) -> None:
        """Make the working directory, with more files by their path in the archive."""

        def copy() -> None:
            shutil.copyfile(self._prepared.base, self.before)
            add_files(self.before, files)
            shutil.copyfile(self.before, self.archive)

        await asyncio.to_thread(copy)


class HarnessSession(Session):
    """The sandbox of one trajectory: namespaces, or limits only."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._namespaces = False
        self._gateway: tuple[str, int] | None = None
        self._marker = f"{_MARKER}={uuid.uuid4().hex}"

    async def __aenter__(self) -> Self:
        config = self._prepared.config
        self._namespaces = await asyncio.to_thread(uses_namespaces, config.isolation, str(config.source))
        return await super().__aenter__()

    @property
    def root(self) -> str:
        """The folder of the files, as commands see it."""
        return WORK if self._namespaces else str(self._folder / "work")

    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it. Raises ConfigError for one that is not HTTP."""
        if not self._has_own_network:
            return url
        parts = urlsplit(url)
        if parts.scheme != "http":
            raise ConfigError(
                f"{self._prepared.config.source}: network is 'gateway', and the gateway is at"
                f" {parts.scheme}://{parts.netloc}",
                hint="use network: host, or a gateway with an http:// URL",
            )
        self._gateway = (str(parts.hostname), parts.port or _HTTP_PORT)
        return parts._replace(netloc=f"{LOOPBACK}:{self._gateway[1]}").geturl()

    @property
    def _has_own_network(self) -> bool:
        return self._namespaces and self._prepared.config.network == "gateway"

    async def _execute(
        self, command: Command, environment: Mapping[str, str], seconds: float, calls_model: bool
    ) -> Execution:
        limits = dataclasses.replace(self._prepared.config.limits, seconds=seconds)
        job = Job(
            visible=self._prepared.visible, directory=str(self._folder), namespaces=self._namespaces,
            keep_files=True, limits=limits.as_dict(), command=arguments_of(command), cwd=WORKSPACE,
            environment={**self._base_environment(), **environment}, shown_bytes=SHOWN_BYTES,
            network="gateway" if self._has_own_network else "host",
            gateway=self._gateway if calls_model and self._has_own_network else None,
        )  # fmt: skip
        try:
            return await launch(job, seconds)
        except ToolServerError:
            await asyncio.to_thread(self._kill_remains)
            raise

    def _base_environment(self) -> dict[str, str]:
        name, _, value = self._marker.partition("=")
        return {
            "HOME": f"{self.root}/{HOME}", "TMPDIR": f"{self.root}/{TEMPORARY}",
            "PATH": os.pathsep.join([*self._prepared.path, SYSTEM_PATH]), name: value,
            "GIT_CONFIG_NOSYSTEM": "1",  # Git ends at a file that exists and cannot be read
        }  # fmt: skip

    def _kill_remains(self) -> None:
        """Kill what a supervisor that was killed itself has left."""
        for pid in process_tree((), self._marker):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def hide(text: str, secrets: Sequence[str]) -> str:
    """Return the text without the values of secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


class ContainerSession(Session):
    """The working directory of one trajectory, which Docker mounts into a container for each command."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._user = _USER if os.getuid() == 0 else os.getuid()

    @property
    def root(self) -> str:
        """The folder of the files, as commands see it."""
        return WORK

    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it: the one that it advertises."""
        return url

    async def _execute(
        self, command: Command, environment: Mapping[str, str], seconds: float, calls_model: bool
    ) -> Execution:
        """The files of a command that leaves more than ``disk_mb`` or ``files`` are dropped."""
        config = self._prepared.config
        name = await asyncio.to_thread(container_name, "harness")
        folder = self._folder / name
        await _files(unpack, self.archive, folder, self._user)
        network = config.network if calls_model else "none"
        words = run_arguments(config, name, folder, self._user, environment, network=network)
        client = DockerClient(config.limits.output_bytes, SHOWN_BYTES)
        out_of_memory = False
        try:
            await client.run(
                [*words, *arguments_of(command)], environment, seconds=seconds,
                over_files=partial(_is_too_large, folder, config.limits),
            )  # fmt: skip
            if client.exceeded is None:
                killed = await control("inspect", "--format", "{{.State.OOMKilled}}", name, may_fail=True)
                out_of_memory = killed.strip() == b"true"
        finally:
            await asyncio.shield(control("rm", "--force", "--volumes", name, may_fail=True))
        await _files(make_readable, folder)
        if await _files(_is_too_large, folder, config.limits):
            client.exceeded = client.exceeded or "files"
        else:
            await _files(pack, folder, self.archive)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return Execution(
            stdout=client.stdout.text, stderr=client.stderr.text, exit_code=client.code,
            exceeded="memory" if out_of_memory else client.exceeded, seconds=client.seconds,
            memory_mb=0.0, stdout_bytes=client.stdout.total, stderr_bytes=client.stderr.total,
        )  # fmt: skip


def run_arguments(
    config: HarnessConfig, name: str, folder: Path, user: int, variables: Mapping[str, str], *, network: str
) -> list[str]:
    """Return the arguments of ``docker`` before the command, with the values of ``OWN_TO_DOCKER`` only."""
    limits = config.limits
    size = f"size={limits.disk_mb}m,nr_inodes={limits.files},mode=1777,exec"
    own = {"HOME": f"{WORK}/{HOME}", "TMPDIR": f"{WORK}/{TEMPORARY}"}
    own |= {name: value for name, value in variables.items() if name in OWN_TO_DOCKER}
    shown = [*(f"{name}={value}" for name, value in own.items()), *(variables.keys() - own.keys())]
    named = [word for variable in sorted(shown) for word in ("--env", variable)]
    return [
        "run", "--interactive", "--name", name, "--network", network, "--user", f"{user}:{user}",
        "--tmpfs", f"/tmp:{size}", "--tmpfs", f"/var/tmp:{size}", "--log-driver", "none",
        *limit_arguments(limits), "--mount", f"type=bind,source={folder},target={WORK}",
        "--workdir", f"{WORK}/{WORKSPACE}", *named, "--entrypoint", "/bin/sh",
        str(config.image), "-c", _GUARDED, "sh",
    ]  # fmt: skip


def _is_too_large(folder: Path, limits: HarnessLimits) -> bool:
    """Return whether the files of a folder exceed ``disk_mb`` or ``files``."""
    size = count = 0
    for parent, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        for name in files:
            with suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                size += max(status.st_size, status.st_blocks * _BLOCK)  # a sparse file is whole in an archive
        if size > limits.disk_mb << 20 or count > limits.files:
            return True
    return False


async def _files(work: Callable[..., T], *arguments: Any) -> T:
    """Do work on the files of a harness in a thread. Raises ToolServerError if it cannot be done."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except (OSError, tarfile.TarError) as error:
        raise ToolServerError(f"the files of the harness cannot be moved: {error}") from error
