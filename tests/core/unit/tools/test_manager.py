"""Test the HTTP protocol of the MCP manager against a local manager."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Event, Thread
from typing import Any

import pytest

from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerConfigError, ToolServerError, tool_server
from agentrl.tools.pool import ToolPool
from agentrl.tools.python import tool
from agentrl.tools.tool import ToolResult, TrajectoryInfo, schema_name

ANY = TrajectoryInfo(id="train/0/t/0")

TOOLS = {
    "math": [{"type": "function", "function": {"name": "mul", "description": "d", "parameters": {"a": 1}}}],
    "text": [{"type": "function", "function": {"name": name}} for name in ("upper", "mul")],
}


class Handler(BaseHTTPRequestHandler):
    server: Manager

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer secret":
            return self.answer({"detail": "who are you"}, 401)
        if self.path == "/mcpapi/servers":
            return self.answer({"servers": list(TOOLS)})
        return self.answer({"tools": TOOLS[self.path.split("/")[3]]})

    def do_POST(self) -> None:
        arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "barrier" in arguments:
            self.server.barrier.wait(30)
        if "wait" in arguments:
            self.server.released.wait(30)
        self.answer(*self.server.answers.get(self.path, (success(arguments),)))

    def answer(self, body: Any, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class Manager(ThreadingHTTPServer):
    answers: dict[str, tuple[Any, ...]]
    released: Event
    barrier: Barrier
    request_queue_size = 512


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    monkeypatch.setenv("MCP_AUTH_TOKEN", "secret")
    server = Manager(("127.0.0.1", 0), Handler)
    server.answers, server.released, server.barrier = {}, Event(), Barrier(120)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join(10)
    server.server_close()


def pool_of(manager: Manager, **flags: Any) -> ToolPool:
    url = f"http://127.0.0.1:{manager.server_address[1]}/mcpapi"
    return ToolPool(ToolConfig(mcp_manager_url=url, **flags))


async def answered(manager: Manager, *answer: Any, **flags: Any) -> ToolResult:
    """Call a tool for which the manager answers ``answer``: a body, and a status other than 200."""
    manager.answers["/mcpapi/tool/text.upper"] = answer
    async with pool_of(manager, **flags) as pool, pool.session(ANY) as tools:
        return await tools.call("upper", {})


def success(content: Any) -> dict[str, Any]:
    return {"status": "success", "content": content}


async def test_tools_of_all_servers(manager: Manager) -> None:
    async with pool_of(manager) as pool, pool.session(ANY) as tools:
        assert pool.servers == ("math", "text")
        assert [schema_name(s) for s in pool.list()] == ["math.mul", "text.mul", "upper"]
        result = await tools.call("math.mul", {"é": 2})
        assert (result.text, result.error, result.server) == ('{"é": 2}', False, "math")


async def test_tools_keep_what_the_manager_says_else_no_call_is_made_twice(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [{**TOOLS["math"][0], "state": "replay"}]
    monkeypatch.setitem(TOOLS, "math", named)
    async with pool_of(manager) as pool, pool.session(ANY) as tools:
        assert [tools.state_of(name) for name in ("math.mul", "upper")] == ["replay", "outside"]


async def test_one_server_is_picked(manager: Manager) -> None:
    async with pool_of(manager, mcp_server_name="math") as pool:
        assert [schema_name(s) for s in pool.list()] == ["mul"]
    with pytest.raises(ToolServerConfigError, match="has no server 'mash'"):
        await pool_of(manager, mcp_server_name="mash").open()


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


SHOT = "[image, image/png, 70 bytes; not shown]"


@pytest.mark.parametrize(
    "answer",
    [
        ({"status": "error", "content": "bad input"},),
        ({"status_code": 422, "detail": "bad input"},),
        ({"detail": "bad input"}, 404),
    ],
)
async def test_an_error_is_the_tools_own(manager: Manager, answer: tuple[Any, ...]) -> None:
    result = await answered(manager, *answer)
    assert (result.text, result.error) == ("bad input", True)


@pytest.mark.parametrize(
    ("content", "text", "images"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": {"n": 1}}], 'a\n{"n": 1}', 0),
        ([{"type": "text", "text": "a"}, {"n": 1}, "b"], 'a\n{"n": 1}\nb', 0),
        ([{"type": "text", "content": "a"}, {"type": "book", "n": 1}], 'a\n{"type": "book", "n": 1}', 0),
        ([{"type": "book", "n": 1}], '[{"type": "book", "n": 1}]', 0),
        ([{"type": "image", "data": PNG}], SHOT, 1),
        ({"type": "image", "content": PNG}, SHOT, 1),
        (["see", {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}],
         f"see\n{SHOT}", 1),
        ([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}], SHOT, 1),
    ],
)  # fmt: skip
async def test_parts_of_a_result_are_read_and_images_are_images(
    manager: Manager, content: Any, text: str, images: int
) -> None:
    result = await answered(manager, success(content))
    assert (result.text, len(result.images), result.error) == (text, images, False)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"status": "success", "content": "\xff"}', "\ufffd"),
        (b'{"status": "success", "content": [NaN, 1e999]}', "[null, null]"),
        (b'{"status": "success", "content": "a', "the result is not valid: "),
        (b'{"content": ' + b"[" * 9000 + b"]" * 9000 + b"}", "the result is not valid: "),
    ],
)
async def test_a_result_that_is_not_json_is_named(manager: Manager, body: bytes, text: str) -> None:
    result = await answered(manager, body)
    assert result.text.startswith(text)
    assert result.error == text.startswith("the result")


async def test_a_slow_call_is_given_up(manager: Manager) -> None:
    async with pool_of(manager, tool_timeout_seconds=0.2) as pool, pool.session(ANY) as tools:
        result = await tools.call("upper", {"wait": 1})
        assert (result.text, result.error) == ("upper was stopped: it did not answer within 0.2 s", True)


async def test_a_lost_call_is_its_own_error_and_the_next_one_asks_first(manager: Manager) -> None:
    manager.answers["/mcpapi/tool/text.upper"] = ({}, 502)
    async with pool_of(manager) as pool, pool.session(ANY) as tools:
        lost = await tools.call("upper", {})
        assert (lost.text, lost.error) == ("upper failed: its server answered HTTP 502", True)
        manager.answers.clear()
        assert (await tools.call("upper", {"a": 1})).text == '{"a": 1}'


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (("slow down", 429), "is overloaded: it answered 429"),
        (("who are you", 401), "answered 401 to /tool/text.upper"),
        ((b"<h1>Welcome</h1>", 200), "answered no JSON: <h1>Welcome</h1>"),
    ],
)
async def test_a_manager_that_serves_nobody_is_an_outage(
    manager: Manager, answer: tuple[Any, ...], problem: str
) -> None:
    with pytest.raises(ToolServerError, match=problem) as failed:
        await answered(manager, *answer)
    assert failed.value.outage == tool_server("text")


async def test_all_calls_reach_the_manager_at_once_and_one_too_long_is_dropped(
    manager: Manager,
) -> None:
    """The manager answers when all 120 are there; a pool of 100 connections never lets them in."""
    flags = {"tool_timeout_seconds": 10, "max_parallel_tool_calls": 256}
    async with pool_of(manager, **flags) as pool, pool.session(ANY) as tools:
        results = await asyncio.gather(*(tools.call("upper", {"barrier": 120}) for _ in range(120)))
    assert not any(result.error for result in results)
    huge = await answered(manager, {"content": "x" * 9 * 2**20})
    assert (huge.text, huge.error) == ("the answer is longer than 8 MiB and was dropped", True)


async def test_a_broken_or_absent_manager_is_a_failure(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_AUTH_TOKEN", "wrong")
    with pytest.raises(ToolServerConfigError, match="answered 401 to /servers"):
        await pool_of(manager).open_reachable()
    manager.shutdown()
    manager.server_close()
    with pytest.raises(ToolServerError, match="cannot be reached"):
        await pool_of(manager).open()


@tool("beside_a_manager")
def beside_a_manager() -> str:
    """Answer."""
    return "yes"


async def test_a_manager_that_answers_later_names_its_servers_then(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.answer(b"<h1>starting</h1>"))
    pool = pool_of(manager, tools="beside_a_manager")
    await pool.open_reachable()
    assert (list(pool.down), pool.known) == (["all"], frozenset({"beside_a_manager"}))
    for use in (lambda: pool.list(["math"]), lambda: pool.session(ANY)):
        with pytest.raises(ToolServerError) as failed:
            use()
        assert failed.value.outage == tool_server("all")
    with pytest.raises(ToolServerError, match="answered no JSON"):
        await pool.connect("all")
    monkeypatch.undo()
    monkeypatch.setenv("MCP_AUTH_TOKEN", "secret")
    await pool.connect("all")
    assert (pool.down, pool.known, pool.servers) == ({}, None, ("beside_a_manager", "math", "text"))
    with pytest.raises(ToolServerError, match="unknown tool server nowhere") as failed:
        pool.list(["nowhere"])
    assert failed.value.outage is None
    await pool.close()
