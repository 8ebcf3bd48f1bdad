"""The quickstart's MCP servers, as real processes behind the real client."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from mcp import Client, StdioServerParameters

from agentrl.base.processes import start_child, stop_child, tail

pytestmark = pytest.mark.integration

CALCULATOR = StdioServerParameters(
    command=sys.executable, args=["-m", "agentrl.base.installation", "demo/calculator.py"]
)
START_SECONDS = 60.0


@pytest.fixture
def units_url(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "units.log"
    command = [sys.executable, "-m", "agentrl.base.installation", "demo/units.py", "--port", str(port)]
    process = start_child(command, log=log)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
        assert process.poll() is None, tail(log, 20)
    finally:
        stop_child(process, 5.0)


@pytest_asyncio.fixture
async def units_address(units_url: str) -> AsyncIterator[str]:
    port = int(units_url.split(":")[2].split("/")[0])
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            await writer.wait_closed()
            break
    yield units_url


async def _call(client: Client, tool: str, **arguments: object) -> tuple[str, bool]:
    result = await client.call_tool(tool, dict(arguments))
    return "".join(getattr(part, "text", "") for part in result.content), bool(result.is_error)


async def test_calculator_computes_over_stdio() -> None:
    async with Client(CALCULATOR, read_timeout_seconds=START_SECONDS) as client:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == ["calculate"]
        assert tools[0].input_schema["required"] == ["expression"]
        assert await _call(client, "calculate", expression="37 * 48") == ("1776", False)


async def test_calculator_explains_what_it_cannot_compute() -> None:
    async with Client(CALCULATOR, read_timeout_seconds=START_SECONDS) as client:
        for expression in ("1 / 0", "__import__('os')", "9 ** 9 ** 9"):
            text, is_error = await _call(client, "calculate", expression=expression)
            assert is_error
            assert text
        assert await _call(client, "calculate", expression="1 + 1") == ("2", False)


async def test_calculator_answers_many_calls_at_once() -> None:
    async with Client(CALCULATOR, read_timeout_seconds=START_SECONDS) as client:
        answers = await asyncio.gather(
            *(_call(client, "calculate", expression=f"{n} * {n}") for n in range(32))
        )
    assert answers == [(str(n * n), False) for n in range(32)]


async def test_units_convert_over_streamable_http(units_address: str) -> None:
    async with Client(units_address, read_timeout_seconds=START_SECONDS) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == {"convert", "utc_now"}
        assert await _call(client, "convert", value=3, from_unit="km", to_unit="m") == ("3000", False)
        assert await _call(client, "convert", value=212, from_unit="F", to_unit="C") == ("100", False)
        text, is_error = await _call(client, "convert", value=1, from_unit="km", to_unit="kg")
        assert is_error
        assert "known units of length: m" in text
