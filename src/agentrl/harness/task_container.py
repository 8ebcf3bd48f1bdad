"""Run the command of a harness in the container that its task brings: that of a Harbor task."""

from __future__ import annotations

import asyncio
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.environments.harbor.environment import Harbor
from agentrl.environments.harbor.verifier import control
from agentrl.errors import ConfigError
from agentrl.harness.config import Command
from agentrl.harness.prepare import Prepared, arguments_of
from agentrl.harness.session import SHOWN_BYTES, Session, forwarded
from agentrl.harness.workspace import HOME, TEMPORARY, WORKSPACE, add_files
from agentrl.own_hosts import is_loopback
from agentrl.tools.sandbox.changes import Changes
from agentrl.tools.sandbox.limits import Execution
from agentrl.tools.sandbox.namespaces import WORK


class TaskContainer(Session):
    """The container of the task. Its files stay in it; the environment compares and scores them."""

    def __init__(self, prepared: Prepared, environment: Harbor) -> None:
        super().__init__(prepared)
        self._environment = environment
        self._gateway: tuple[str, int] | None = None

    @property
    def root(self) -> str:
        """The folder of the harness's own files, beside the task's."""
        return WORK

    @property
    def workspace(self) -> str:
        """The working directory of the task."""
        return self._environment.container.spec.workdir or "/"

    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it: its own, or a loopback without a network.

        Raises ConfigError if the container does not reach the gateway and its back end does not forward it.
        """
        container = self._environment.container
        network = container.spec.network
        if network == "host" or (network != "none" and not is_loopback(urlsplit(url).hostname or "")):
            return url
        if not container.forwards_gateway:
            raise ConfigError(
                f"the container of task {self._environment.task.task_id} cannot reach the gateway {url} from"
                f" its network {network!r}",
                hint="use --rootfs, whose sandbox forwards the gateway; or, for tasks with network_mode ="
                ' "public", a --gateway_url that containers reach, or --task_network host',
            )
        self._gateway, url = forwarded(url, self._prepared.config.source)
        return url

    async def fill(self, files: Mapping[str, bytes]) -> None:
        """Copy the files of the harness into the container; its work into the task's folder."""
        if self._gateway is not None:
            await self._environment.connect(self._gateway)
        inside = f"{WORKSPACE}/"
        own = {name: content for name, content in files.items() if not name.startswith(inside)}
        work = {name[len(inside) :]: content for name, content in files.items() if name.startswith(inside)}
        container = self._environment.container
        await control(container, f"mkdir -p {WORK}/{HOME} {WORK}/{TEMPORARY}")
        for into, content in ((WORK, own), (self.workspace, work)):
            archive = self._folder / "own.tar"
            await asyncio.to_thread(_pack, archive, content)
            await container.copy(archive, into=into)
        if (user := self._environment.user) is not None:
            paths = [WORK, *(f"{self.workspace}/{name}" for name in work)]
            await control(container, shlex.join(["chown", "-R", "--", user, *paths]))

    async def changes(self) -> Changes:
        """Return none: the environment compares the files of its container."""
        return Changes((), 0, "")

    async def _execute(
        self, command: Command, environment: Mapping[str, str], seconds: float, calls_model: bool
    ) -> Execution:
        folders = {"HOME": f"{WORK}/{HOME}", "TMPDIR": f"{WORK}/{TEMPORARY}"}
        return await self._environment.container.run(
            arguments_of(command), seconds=seconds, environment={**folders, **environment},
            user=self._environment.user, output_bytes=self._prepared.config.limits.output_bytes,
            shown_bytes=SHOWN_BYTES,
        )  # fmt: skip


def _pack(archive: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT):
        pass
    add_files(archive, files)
