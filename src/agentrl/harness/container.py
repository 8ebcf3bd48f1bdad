"""Run the commands of one trajectory in Docker: a container for each, on one working directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from agentrl.documents.record import CommandRun
from agentrl.errors import ToolServerError
from agentrl.harness.command import arguments_of
from agentrl.harness.config import Command, HarnessConfig, HarnessLimits
from agentrl.harness.prepare import Prepared
from agentrl.harness.session import SHOWN_BYTES, Session, command_run
from agentrl.harness.workspace import HOME, TEMPORARY, WORKSPACE, make_readable, pack, unpack
from agentrl.tools.sandbox.docker import OWN_TO_DOCKER, DockerClient, container_name, control, limit_arguments
from agentrl.tools.sandbox.limits import Execution

T = TypeVar("T")

ROOT: Final = "/sandbox"
"""The folder of the files in the container."""
_USER: Final = 1000
"""The user of the container where the sampler is root."""
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
        return command_run(
            Execution(
                stdout=client.stdout.text, stderr=client.stderr.text, exit_code=client.code,
                exceeded="memory" if out_of_memory else client.exceeded, seconds=client.seconds,
                memory_mb=0.0, stdout_bytes=client.stdout.total, stderr_bytes=client.stderr.total,
            ),
            secrets,
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
        "--tmpfs", f"/tmp:{size}", "--tmpfs", f"/var/tmp:{size}", "--log-driver", "none",
        *limit_arguments(limits), "--mount", f"type=bind,source={folder},target={ROOT}",
        "--workdir", f"{ROOT}/{WORKSPACE}", *named, "--entrypoint", "/bin/sh",
        str(config.image), "-c", _GUARDED, "sh",
    ]  # fmt: skip


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
