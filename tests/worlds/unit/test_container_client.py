"""The clients of Docker and Kubernetes: rights, limits, what a process list may show, messages, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from path_programs import stand_in
from waiting import until
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from agentrl.errors import ToolServerError
from agentrl.worlds.containers.docker import DockerContainer, kill_client, start_arguments, start_client
from agentrl.worlds.containers.kubernetes import Command, open_exec
from agentrl.worlds.harness.prepare import HarnessConfig, HarnessLimits
from agentrl.worlds.sandbox.tool import program_container

LIMITS = HarnessLimits(memory_mb=64, processes=8, disk_mb=16, files=99, open_files=32, cpu_seconds=3)
CONFIG = HarnessConfig(
    source=Path("harness.yml"), command="true", isolation="docker", image="image:1", network="models",
    limits=LIMITS,
)  # fmt: skip


SIZE = "size=16m,nr_inodes=99,uid=1000,gid=1000,mode=1777,exec"
RIGHTS = {
    "of a harness": (CONFIG.container_spec(network="models"), (
        "--network models", *(f"--tmpfs {folder}:{SIZE}" for folder in ("/sandbox", "/tmp", "/var/tmp")),
    )),
    "of a model's programs": (program_container(LIMITS, "image:1"), (
        "--network none", "--workdir /work", "/work:size=16m,nr_inodes=99,uid=65534,gid=65534",
        "/tmp:size=16m",
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHTS)
def test_a_container_has_no_right_and_every_limit(name: str) -> None:
    spec, own = RIGHTS[name]
    command = " ".join(start_arguments(spec, "name", "image:1"))
    for part in (
        *own, "--user 65533:65533", "--read-only", "--cap-drop ALL", "no-new-privileges", "--memory 64m",
        "--memory-swap 64m", "--pids-limit 14", "nofile=32", "cpu=3", f"fsize={16 << 20}", "core=0",
        "--log-driver none",
    ):  # fmt: skip
        assert part in command
    assert "privileged" not in command.replace("no-new-privileges", "")


@pytest.mark.attack
async def test_variables_of_commands_reach_neither_the_client_nor_a_process_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "LD_PRELOAD": "/task/evil.so", "HTTPS_PROXY": "http://attacker:1", "DOCKER_HOST": "tcp://attacker:1",
        "PATH": "/opt/bin:/bin:/usr/bin", "KEY": "it's\n$(echo secret) ", "HOME": "/root",
    }  # fmt: skip
    docker = (
        f'#!/bin/sh\nenv > {tmp_path}/env\necho "$@" > {tmp_path}/words\n'
        'while [ "$1" != /bin/sh ]; do shift; done\nexec "$@"\n'
    )
    stand_in(monkeypatch, tmp_path, "docker", docker)
    container = DockerContainer(CONFIG.container_spec(network="models"))
    done = await container.run(
        ["/bin/sh", "-c", 'cat; printf "%s|" "$LD_PRELOAD" "$KEY" "$PATH" "$HOME"'], seconds=10,
        environment=given, stdin=b"read",
    )  # fmt: skip
    names = ("LD_PRELOAD", "KEY", "PATH", "HOME")
    assert done.stdout == "read" + "".join(f"{given[name]}|" for name in names)
    seen = (tmp_path / "env").read_text() + (tmp_path / "words").read_text()
    assert not any(word in seen for word in ("evil.so", "attacker", "secret", "/opt/bin"))


async def test_a_client_that_prints_without_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, "docker", "#!/bin/sh\nexec yes\n")
    process = await start_client(["run"])
    assert process.stdout is not None
    await until(lambda: process.stdout._paused)  # type: ignore[union-attr]
    await asyncio.wait_for(kill_client(process), 20)
    assert process.returncode == -9


async def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolServerError, match="none on PATH"):
        await start_client(["run"])


def test_a_command_says_its_id_first_and_its_output_is_limited() -> None:
    command = Command(output_bytes=4, shown_bytes=None)
    for content in (b"1", b"7\nab", b"cd"):
        command.receive(1, content)
    assert (command.pid, command.stdout.text, command.exceeded) == (17, "abcd", None)
    command.receive(2, b"12345")
    assert command.exceeded == "output"
    command.receive(3, b'{"details": {"causes": [{"reason": "ExitCode", "message": "3"}]}}')
    assert command.code == 3


async def test_the_failure_of_a_commands_input_reaches_its_caller() -> None:
    async def silent(socket: ServerConnection) -> None:
        await socket.wait_closed()

    async def stdin() -> AsyncIterator[bytes]:
        yield b"a"
        raise ValueError("the input")

    async def run(port: int) -> None:
        cluster: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}", ssl=None, headers=dict)
        async with open_exec(cluster, "/pods/p", ["cat"], stdin()) as messages:
            async for _ in messages:
                pass

    async with serve(silent, "127.0.0.1", 0, subprotocols=[Subprotocol("v5.channel.k8s.io")]) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        with pytest.raises(ValueError, match="the input"):
            await asyncio.wait_for(run(port), 10)
