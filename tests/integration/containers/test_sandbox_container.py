"""Containers of this machine's sandbox: state, rights, limits, copies, network, and what a kill leaves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rootfs_here import make_rootfs, rootfs_problem

from agentrl.containers.base import CONTAINERS, Container, ContainerSpec
from agentrl.containers.sandbox import SandboxContainer
from agentrl.errors import ConfigError, ToolServerError
from agentrl.tools.sandbox.limits import Execution

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(rootfs_problem() is not None, reason="this machine has no namespaces"),
]


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("rootfs") / "root")


def spec(rootfs: Path, **changed: Any) -> ContainerSpec:
    return ContainerSpec(name="test", rootfs=str(rootfs), **{"seconds": 60, "storage_mb": 64, **changed})


@pytest.fixture
async def box(rootfs: Path) -> AsyncIterator[Container]:
    async with CONTAINERS.get("sandbox")(spec(rootfs)) as started:
        yield started


async def sh(box: Container, line: str, **options: Any) -> Execution:
    return await box.run(["/bin/sh", "-c", line], **{"seconds": 20, **options})


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
from agentrl.containers.base import ContainerSpec
from agentrl.containers.sandbox import SandboxContainer
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


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="docker export"):
        SandboxContainer.check(ContainerSpec(name="test", image="debian:12", seconds=1), "h.yml")
    with pytest.raises(ConfigError, match="there is no root file system"):
        SandboxContainer.check(spec(tmp_path / "none"), "h.yml")
    (tmp_path / "bad.tar").write_text("no archive")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        SandboxContainer.check(spec(tmp_path / "bad.tar"), "h.yml")
