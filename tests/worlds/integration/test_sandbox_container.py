"""Containers of this machine's sandbox: state, rights, limits, copies, network, and what a kill leaves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rootfs_here import make_rootfs, rootfs_problem, sh

from agentrl.errors import ConfigError, ToolServerError
from agentrl.worlds.containers.container import CONTAINERS, Container, ContainerSpec
from agentrl.worlds.sandbox import container as sandbox
from agentrl.worlds.sandbox import local
from agentrl.worlds.sandbox.container import SandboxContainer
from agentrl.worlds.sandbox.local import LauncherProcess
from agentrl.worlds.sandbox.program import descendants
from agentrl.worlds.sandbox.rootfs import _is_running

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(rootfs_problem() is not None, reason="this machine has no namespaces"),
]


def spec(rootfs: Path, **changed: Any) -> ContainerSpec:
    return ContainerSpec(name="test", rootfs=str(rootfs), **{"seconds": 60, "storage_mb": 64, **changed})


@pytest.fixture
async def box(rootfs: Path) -> AsyncIterator[Container]:
    async with CONTAINERS.get("sandbox")(spec(rootfs)) as started:
        yield started


async def test_a_command_gets_its_input_variables_folder_and_user(box: Container) -> None:
    done = await sh(
        box,
        "cat; echo $A $HOME; pwd; id -u",
        environment={"A": "b"},
        workdir="/new/here",
        stdin=b"\xe9\xff in",
    )
    assert done.stdout.splitlines() == ["\ufffd\ufffd inb /root", "/new/here", "0"]
    if os.getuid() == 0:
        assert (await sh(box, "id -u; echo $HOME; touch /etc/x", user="user")).stdout == "1000\n/home/user\n"
    assert (await box.run(["nothing"], seconds=20)).exit_code == 127
    assert (await sh(box, "exit 7")).exit_code == 7
    assert (await sh(box, "kill -9 $$")).exit_code == -9


@pytest.mark.attack
async def test_root_inside_is_nobody_outside(box: Container) -> None:
    for line in (
        "cat /proc/sys/kernel/core_pattern > /proc/sys/kernel/core_pattern",
        "echo > /proc/sysrq-trigger", "ls /proc/1/root",
        "cat /proc/1/mem", "kill -9 1; cat /proc/1/status > /dev/null && exit 1",
    ):  # fmt: skip
        assert (await sh(box, line)).exit_code != 0, line
    assert (await sh(box, "ls /proc | grep -c '^[0-9]'")).stdout.strip() in ("4", "5")
    assert (await sh(box, "hostname; ls /.old")).stdout == "container\n"


@pytest.mark.parametrize(
    ("line", "exceeded", "changed"),
    [
        ("while :; do :; done", "time", {"seconds": 0.5}),
        ("while :; do echo yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; done", "output", {"output_bytes": 10000}),
        ("dd if=/dev/zero of=/root/x bs=1M; sleep 5", "files", {}),
        ("x=x; while :; do x=$x$x; done", "memory", {}),
    ],
)
async def test_limits_end_a_command(rootfs: Path, line: str, exceeded: str, changed: dict[str, Any]) -> None:
    async with SandboxContainer(spec(rootfs, memory_mb=100)) as box:
        assert (await sh(box, line, **changed)).exceeded == exceeded
        assert (await sh(box, "echo lives")).stdout == "lives\n"


async def test_only_the_gateway_is_reachable(rootfs: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        line = f"exec 3<>/dev/tcp/127.0.0.1/{port} && cat <&3"
        for network, expected in (("gateway", "hello\n"), ("none", ""), ("host", "hello\n")):
            changed = {"network": network, "gateway": ("127.0.0.1", port)}
            async with SandboxContainer(spec(rootfs, **changed)) as box:
                assert (await box.run(["bash", "-c", line], seconds=20)).stdout == expected


async def test_it_ends_by_itself(rootfs: Path) -> None:
    async with SandboxContainer(spec(rootfs, seconds=1)) as box:
        assert (await sh(box, "sleep 20")).exit_code == -9
        with pytest.raises(ToolServerError):
            await sh(box, "true")


KILLED = """
import asyncio, sys
from agentrl.worlds.containers.container import ContainerSpec
from agentrl.worlds.sandbox.container import SandboxContainer
async def main():
    async with SandboxContainer(ContainerSpec(name="test", rootfs=sys.argv[1], seconds=60)) as box:
        await box.run(["/bin/sh", "-c", "exec 1>/dev/null 2>&1; sleep 4321 &"], seconds=10)
        print("begun", flush=True)
        await box.run(["/bin/sh", "-c", "sleep 4321"], seconds=50)
asyncio.run(main())
"""


def test_a_killed_sampler_leaves_nothing(rootfs: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(rootfs)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.kill()
    process.communicate(timeout=20)

    def left() -> list[str]:
        lines = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                lines.append(Path(f"/proc/{name}/cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return [line for line in lines if "sleep 4321" in line and "sh -c" not in line]

    deadline = time.monotonic() + 20
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left() == []


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], LauncherProcess]]:
    """Return a function that makes containers start by a launcher with changed code."""
    started: list[LauncherProcess] = []

    def start(change: str) -> LauncherProcess:
        code = local.start_code("main").replace(" launcher.main()", f" exec({change!r}); launcher.main()")
        monkeypatch.setattr(local, "start_code", lambda function: code)
        started.append(LauncherProcess())
        monkeypatch.setattr(sandbox, "LAUNCHER", started[0])
        return started[0]

    yield start
    for one in started:
        one.stop()


SLOW = "from agentrl.worlds.sandbox import linux; import time; linux.set_hostname = lambda _: time.sleep(60)"


async def test_a_start_whose_launcher_is_killed_leaves_nothing(
    rootfs: Path, launcher: Callable[[str], LauncherProcess]
) -> None:
    started = launcher(SLOW)
    starting = asyncio.create_task(SandboxContainer(spec(rootfs)).start())
    processes: list[int] = []
    async with asyncio.timeout(30):
        while len(processes) < 4:  # with the holder, the parent of the first process, and this one
            await asyncio.sleep(0.02)
            processes = [] if started._process is None else list(descendants(started._process.pid))
        assert started._process is not None
        started._process.kill()
        with pytest.raises(ToolServerError):
            await starting
        while processes:
            await asyncio.sleep(0.02)
            processes = [one for one in processes if _is_running(one)]


NO_OVERLAY = """
from agentrl.worlds.sandbox import linux
def refuse(source, target, kind="", flags=0, options="", mount=linux.mount):
    if kind == "overlay":
        raise OSError("no overlay")
    mount(source, target, kind, flags, options)
linux.mount = refuse
"""


async def test_a_kernel_without_overlays_gets_a_copy(
    tmp_path: Path, launcher: Callable[[str], LauncherProcess]
) -> None:
    root = make_rootfs(tmp_path / "root")
    (root / "opt/in").mkdir(parents=True)
    for name, mode in (("in/mine", 0o640), ("tool", 0o6755)):
        (root / "opt" / name).write_text(name)
        if os.getuid() == 0:
            os.chown(root / "opt" / name, 1000, 1001)
        (root / "opt" / name).chmod(mode)
    (root / "opt/link").symlink_to("in/mine")
    (root / "opt/dangling").symlink_to("/nowhere")
    os.mkfifo(root / "opt/pipe")
    launcher(NO_OVERLAY)
    async with SandboxContainer(spec(root)) as box, SandboxContainer(spec(root)) as other:
        assert (await sh(box, "stat -f -c %T /")).stdout == "tmpfs\n"
        owner = "1000 1001" if os.getuid() == 0 else "0 0"
        listed = await sh(box, "cd /opt; stat -c '%u %g %a' in/mine tool; cat link; readlink dangling; ls")
        assert listed.stdout.split("\n") == [
            f"{owner} 640", f"{owner} 6755", "in/mine/nowhere", "dangling", "in", "link", "tool", "",
        ]  # fmt: skip
        assert (await sh(box, "echo changed > /opt/in/mine; rm /opt/tool")).succeeded
        assert (await sh(other, "cat /opt/in/mine /opt/tool")).stdout == "in/minetool"
    assert (root / "opt/in/mine").read_text() == "in/mine"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="docker export"):
        SandboxContainer.check(ContainerSpec(name="test", image="debian:12", seconds=1), "h.yml")
    with pytest.raises(ConfigError, match="there is no root file system"):
        SandboxContainer.check(spec(tmp_path / "none"), "h.yml")
    (tmp_path / "bad.tar").write_text("no archive")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        SandboxContainer.check(spec(tmp_path / "bad.tar"), "h.yml")
