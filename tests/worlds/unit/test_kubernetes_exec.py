"""Commands in a pod by websocket: what a command says, and a failure of its input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from agentrl.worlds.containers.kubernetes import Command, open_exec


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
