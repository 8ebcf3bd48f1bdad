"""Run the commands of one trajectory on one working directory: in the sandbox, or in containers."""

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from agentrl.atomic_folder import scratch_folder
from agentrl.containers.base import CONTAINERS, FilesTooLargeError
from agentrl.documents.record import CommandRun
from agentrl.errors import ConfigError, ToolServerError
from agentrl.harness.config import Command
from agentrl.harness.prepare import SYSTEM_PATH, Prepared, arguments_of
from agentrl.harness.workspace import HOME, TEMPORARY, WORKSPACE, add_files, keep
from agentrl.processes import process_tree
from agentrl.tools.sandbox.changes import Changes, compare
from agentrl.tools.sandbox.limits import Execution
from agentrl.tools.sandbox.local import launch, uses_namespaces
from agentrl.tools.sandbox.namespaces import LOOPBACK, WORK
from agentrl.tools.sandbox.program import Job
from agentrl.untrusted_folder import discard

logger = logging.getLogger(__name__)

SHOWN_BYTES: Final = 64 << 10
"""Bytes of each output that are kept."""
_MARKER: Final = "AGENTRL_HARNESS"
_HTTP_PORT: Final = 80
_HEADERS: Final = 64 << 20
"""Of the archive that a container packs, beside the contents of files."""


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
        await asyncio.to_thread(discard, self._folder)

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

    @property
    def workspace(self) -> str:
        """The working directory, as commands see it."""
        return f"{self.root}/{WORKSPACE}"

    async def changes(self) -> Changes:
        """Return what differs in the working directory from its beginning."""
        return await asyncio.to_thread(compare, self.before, self.archive, WORKSPACE)

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
        self._gateway, url = forwarded(url, self._prepared.config.source)
        return url

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


class ContainerSession(Session):
    """The files of one trajectory, which are copied into a new container for each command."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._kind = CONTAINERS.get(prepared.config.isolation)
        self._gateway: tuple[str, int] | None = None

    @property
    def root(self) -> str:
        """The folder of the files, as commands see it."""
        return WORK

    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it: the one that it advertises, or a loopback."""
        config = self._prepared.config
        if config.network == "gateway" and self._kind.forwards_gateway:
            self._gateway, url = forwarded(url, config.source)
        return url

    async def _execute(
        self, command: Command, environment: Mapping[str, str], seconds: float, calls_model: bool
    ) -> Execution:
        """The files of a command that leaves more than ``disk_mb`` or ``files`` are dropped."""
        config = self._prepared.config
        network, gateway = (config.network, self._gateway) if calls_model else ("none", None)
        folders = {"HOME": f"{WORK}/{HOME}", "TMPDIR": f"{WORK}/{TEMPORARY}"}
        packed = self._folder / "packed.tar"
        async with self._kind(config.container_spec(network=network, gateway=gateway)) as container:
            await container.copy(self.archive, into=WORK)
            done = await container.run(
                arguments_of(command), seconds=seconds, environment={**folders, **environment},
                workdir=f"{WORK}/{WORKSPACE}", output_bytes=config.limits.output_bytes,
                shown_bytes=SHOWN_BYTES,
            )  # fmt: skip
            try:
                await container.copy(packed, out_of=WORK, limit=(config.limits.disk_mb << 21) + _HEADERS)
                is_kept = await asyncio.to_thread(keep, packed, self.archive, config.limits)
            except FilesTooLargeError:
                is_kept = False
            except (ToolServerError, FileNotFoundError, tarfile.TarError) as error:
                if done.exceeded is None:  # else a limit may have ended the container
                    raise ToolServerError(f"the files of the harness cannot be copied: {error}") from error
                is_kept = True
        await asyncio.to_thread(packed.unlink, missing_ok=True)
        return done if is_kept else dataclasses.replace(done, exceeded=done.exceeded or "files")


def hide(text: str, secrets: Sequence[str]) -> str:
    """Return the text without the values of secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def forwarded(url: str, source: Path) -> tuple[tuple[str, int], str]:
    """Return the address of the gateway, and its URL where it is forwarded. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise ConfigError(
            f"{source}: network is 'gateway', and the gateway is at {parts.scheme}://{parts.netloc}",
            hint="use network: host, or a gateway with an http:// URL",
        )
    address = (str(parts.hostname), parts.port or _HTTP_PORT)
    return address, parts._replace(netloc=f"{LOOPBACK}:{address[1]}").geturl()
