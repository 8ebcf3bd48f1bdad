"""Real MCP servers over stdio and streamable HTTP: calls, errors, time-outs, losses."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from open_tools import open_tools
from server_process import end_server, start_server

from agentrl.base.processes import free_port
from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerConfigError, ToolServerError
from agentrl.tools.mcp import server
from agentrl.tools.pool import ToolPool
from agentrl.tools.tool import TrajectoryInfo, schema_name

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

SERVER = str(Path(__file__).parent / "servers" / "demo_server.py")


def stdio_entry(*more: str) -> dict[str, object]:
    return {"command": "python", "args": [SERVER, "stdio", *more], "scope": "shared"}


def config_of(tmp_path: Path, servers: dict[str, object], **flags: object) -> ToolConfig:
    path = tmp_path / "servers.yml"
    path.write_text(yaml.safe_dump({"servers": servers}))
    return ToolConfig(mcp_servers_file=str(path), **flags)


@contextmanager
def serving(*more: str) -> Iterator[int]:
    """Run the HTTP server; yield its port."""
    port = free_port()
    process = start_server(port, sys.executable, SERVER, str(port), *more)
    try:
        yield port
    finally:
        end_server(process, port)


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of an HTTP server."""
    with serving() as port:
        yield f"http://127.0.0.1:{port}/mcp"


async def test_stdio_server_answers_and_its_errors_are_results(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"demo": stdio_entry()}, max_tool_result_chars=100)
    async with open_tools(config) as pool:
        names = [schema_name(schema) for schema in await pool.list()]
        assert names == sorted(names)
        assert "add" in names
        good = await pool.call("add", {"a": 2, "b": 3})
        assert (good.text, good.error, good.server) == ("5", False, "demo")
        refused = await pool.call("refuse", {"reason": "not today"})
        assert refused.error
        assert "not today" in refused.text
        wrong = await pool.call("add", {"a": "x"})
        assert wrong.error
        long = await pool.call("long_text", {"length": 500})
        assert long.text.endswith("[cut: 400 more characters]")


async def test_a_slow_call_is_stopped_and_the_server_stays(tmp_path: Path) -> None:
    entry = {**stdio_entry(), "tools": {"wait": {"timeout_seconds": 0.5}}}
    config = config_of(tmp_path, {"demo": entry})
    async with open_tools(config) as pool:
        before = await pool.call("pid", {})
        slow = await pool.call("wait", {"seconds": 30})
        assert slow.error
        assert "did not answer within 0.5 s" in slow.text
        assert (await pool.call("pid", {})).text == before.text


async def test_many_calls_at_once_share_one_connection(tmp_path: Path) -> None:
    async with open_tools(config_of(tmp_path, {"demo": stdio_entry()})) as pool:
        results = await asyncio.gather(*(pool.call("add", {"a": i, "b": i}) for i in range(32)))
        assert [result.text for result in results] == [str(2 * i) for i in range(32)]
        pids = await asyncio.gather(*(pool.call("pid", {}) for _ in range(4)))
        assert len({result.text for result in pids}) == 1


async def test_the_older_transport_is_spoken_too(tmp_path: Path) -> None:
    with serving("sse") as port:
        entry = {"url": f"http://127.0.0.1:{port}/sse", "transport": "sse"}
        async with open_tools(config_of(tmp_path, {"old": entry})) as tools:
            assert (await tools.call("add", {"a": 2, "b": 3})).text == "5"


async def test_a_server_of_the_newest_protocol_announces_its_new_tool(tmp_path: Path, url: str) -> None:
    for entry in ({"url": url}, stdio_entry()):
        async with open_tools(config_of(tmp_path, {"demo": entry})) as tools:
            first = (await tools.call("grow", {})).text
            second = (await tools.call("add", {"a": 1, "b": 1})).text
            assert "the tools of this server changed: now also" in first + second
            assert (await tools.call("grown", {"q": "x"})).text == "about x"


async def test_tools_of_one_name_on_two_servers_are_prefixed(tmp_path: Path, url: str) -> None:
    servers = {"local": stdio_entry("lookup"), "web": {"url": url}}
    async with open_tools(config_of(tmp_path, servers)) as pool:
        names = [schema_name(schema) for schema in await pool.list()]
        assert "lookup" in names
        assert {"local.add", "web.add"} <= set(names)
        assert "add" not in names
        assert (await pool.call("web.add", {"a": 1, "b": 1})).server == "web"
    async with ToolPool(config_of(tmp_path, servers)) as all_servers:
        async with all_servers.session(TrajectoryInfo(id="t", servers=("web",))) as tools:
            assert "add" in [schema_name(schema) for schema in await tools.list()]
        async with all_servers.session(TrajectoryInfo(id="t", servers=())) as tools:
            assert await tools.list() == []
        with pytest.raises(ToolServerError, match="unknown tool server nowhere"):
            all_servers.list(["nowhere"])


async def test_unreachable_servers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RECONNECT_DELAYS", (0.0,))
    for entry, kind in (
        ({"url": f"http://127.0.0.1:{free_port()}/mcp"}, ToolServerError),
        ({"command": "/no/such/program"}, ToolServerConfigError),
        ({"command": "false"}, ToolServerConfigError),
    ):
        pool = ToolPool(config_of(tmp_path, {"gone": entry}))
        with pytest.raises(kind, match=r"tool server gone \(.*cannot be reached"):
            await pool.open()
        if kind is ToolServerError:
            await pool.open_reachable()
            assert list(pool.down) == ["gone"]
            await pool.close()


async def test_closing_ends_the_stdio_server(tmp_path: Path) -> None:
    async with open_tools(config_of(tmp_path, {"demo": stdio_entry()})) as tools:
        child = int((await tools.call("pid", {})).text)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
