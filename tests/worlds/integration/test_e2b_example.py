"""The example of an own back end, on a stand-in of E2B's package: nothing here reaches E2B."""

from __future__ import annotations

import asyncio
import importlib
import io
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_docker import inside
from rootfs_here import make_rootfs, rootfs_problem

from agentrl.errors import ToolServerError
from agentrl.worlds.containers.container import CONTAINERS, Container, ContainerSpec, FilesTooLargeError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(rootfs_problem() is not None, reason="this machine has no namespaces"),
]


class SandboxException(Exception):  # noqa: N818
    """Of E2B."""


class TimeoutException(SandboxException):
    """Of E2B."""


class CommandExitException(SandboxException):
    """Of E2B."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class AsyncSandbox:
    """Of E2B: commands run below a folder of this machine."""

    root = Path()
    killed = 0

    @classmethod
    async def create(cls, template: str | None, **options: Any) -> AsyncSandbox:
        if template == "none":
            raise SandboxException("no such template")
        return cls()

    @property
    def files(self) -> AsyncSandbox:
        return self

    commands = files

    async def write(self, path: str, data: bytes, user: str | None = None) -> None:
        (self.root / path[1:]).write_bytes(data)

    async def read(self, path: str, *, format: str, user: str | None = None) -> bytearray:
        return bytearray((self.root / path[1:]).read_bytes())

    async def run(
        self, cmd: str, *, envs: dict[str, str], user: str, timeout: float, retain_output: bool,
        on_stdout: Callable[[str], Any], on_stderr: Callable[[str], Any],
    ) -> None:  # fmt: skip
        words = inside(self.root, "/", ["/bin/sh", "-c", cmd])
        environment = {"PATH": "/usr/bin:/bin", **envs}
        try:
            done = await asyncio.to_thread(
                subprocess.run,
                words,
                capture_output=True,
                text=True,
                timeout=timeout,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutException from error
        on_stdout(done.stdout)
        on_stderr(done.stderr)
        if done.returncode:
            raise CommandExitException(done.returncode)

    async def kill(self) -> None:
        AsyncSandbox.killed += 1


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Container]]:
    package = ModuleType("e2b")
    for one in (AsyncSandbox, CommandExitException, SandboxException, TimeoutException):
        setattr(package, one.__name__, one)
    monkeypatch.setitem(sys.modules, "e2b", package)
    monkeypatch.setattr(AsyncSandbox, "root", make_rootfs(tmp_path / "root"))
    monkeypatch.syspath_prepend("assets/examples/containers")
    yield CONTAINERS.get("e2b_container:E2BContainer")
    sys.modules.pop("e2b_container", None)
    importlib.invalidate_caches()


async def test_the_example_runs_commands_and_copies(kind: type[Container], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "in.tar", "w") as target:
        member = tarfile.TarInfo("a")
        member.size = 2
        target.addfile(member, io.BytesIO(b"hi"))
    async with kind(ContainerSpec(name="test", seconds=60)) as box:
        await box.copy(tmp_path / "in.tar", into="/work/deep")
        line = 'cat a; cat; echo "$A" >&2; exit 3'
        done = await box.run(
            ["/bin/sh", "-c", line], seconds=10, workdir="/work/deep", environment={"A": "b"}, stdin=b" in"
        )
        assert (done.stdout, done.stderr, done.exit_code) == ("hi in", "b\n", 3)
        assert (await box.run(["sleep", "5"], seconds=0.3)).exceeded == "time"
        await box.copy(tmp_path / "out.tar", out_of="/work")
        with tarfile.open(tmp_path / "out.tar") as source:
            assert "./deep/a" in source.getnames()
        with pytest.raises(FilesTooLargeError):
            await box.copy(tmp_path / "out.tar", out_of="/work", limit=100)
        with pytest.raises(FileNotFoundError):
            await box.copy(tmp_path / "out.tar", out_of="/none")
    assert AsyncSandbox.killed == 1
    with pytest.raises(ToolServerError, match="no such template") as caught:
        await kind(ContainerSpec(name="test", seconds=60, options={"template": "none"})).start()
    assert caught.value.outage is not None
