"""Tell a lost session from errors of a server's own, over a server that answers in this process."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx2
import pytest

from agentrl.config.schema import ToolConfig
from agentrl.errors import SessionLostError
from agentrl.tools.config import Hook, HttpSpec, Options, Scope
from agentrl.tools.mcp import http, server
from agentrl.tools.mcp.content import MAX_MESSAGE_BYTES
from agentrl.tools.mcp.server import mcp_server
from agentrl.tools.tool import ServerSession, TrajectoryInfo

Answer = tuple[int, str, bytes]
JSON = "application/json"
GONE: Answer = (404, "text/plain", b"")
TOOL = {"name": "lookup", "inputSchema": {"type": "object"}}


def error(code: Any, message: Any, status: int = 200, **more: Any) -> Answer:
    content = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message, **more}}
    return status, JSON, json.dumps(content).encode()


class Server(httpx2.AsyncBaseTransport):
    """A server that keeps sessions; ``forget`` is its restart, ``lost`` its answer to an unknown session."""

    def __init__(self, lost: Answer = GONE, *, failing: Any = None, names: bool = True) -> None:
        """``failing`` answers each call; ``names``: its sessions have names, else it knows every request."""
        self.lost, self.names, self.failing = lost, names, failing
        self.sessions: set[str] = set()
        self.opened = 0
        self.more: list[dict[str, Any]] = []
        """Further tools that it lists."""
        self.called: list[str] = []

    def forget(self) -> None:
        self.sessions.clear()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(0)
        if request.method != "POST":
            return httpx2.Response(405)
        message = json.loads(request.content)
        if message["method"] == "server/discover":
            return self._response((404, JSON, b"{}"))
        if message["method"] == "initialize":
            self.opened += 1
            self.sessions.add(f"s{self.opened}")
            info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            result: Any = {**info, "serverInfo": {"name": "s", "version": "1"}}
            named = {"mcp-session-id": f"s{self.opened}"} if self.names else {}
            return self._response(self._result(message, result), named)
        if request.headers.get("mcp-session-id", "") not in (self.sessions if self.names else {""}):
            return self._response(self.lost)
        if "id" not in message:
            return httpx2.Response(202)
        if message["method"] == "tools/list":
            return self._response(self._result(message, {"tools": [TOOL, *self.more]}))
        self.called.append(request.headers.get("mcp-session-id", ""))
        found = {"content": [{"type": "text", "text": "found"}]}
        if isinstance(self.failing, tuple):
            return self._response(self.failing)
        return self._response(self._result(message, self.failing or found))

    @staticmethod
    def _result(message: Any, result: Any) -> Answer:
        return 200, JSON, json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()

    @staticmethod
    def _response(answer: Answer, headers: dict[str, str] | None = None) -> httpx2.Response:
        status, kind, body = answer
        more = {"content-encoding": "gzip"} if body[:2] == b"\x1f\x8b" else {}
        return httpx2.Response(
            status, headers={"content-type": kind, **more, **(headers or {})}, content=body
        )


Open = Callable[..., AbstractAsyncContextManager[server.McpServer]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    @asynccontextmanager
    async def open_server(remote: Server, **options: Any) -> AsyncIterator[server.McpServer]:
        client = httpx2.AsyncClient(transport=http.GuardedTransport(remote))
        monkeypatch.setattr(http, "open_client", lambda *_, **__: client)
        spec = HttpSpec(name="kv", url="http://kv.test/mcp", options=Options(**options))
        tools = mcp_server(spec, ToolConfig(tool_timeout_seconds=5))
        await tools.open()
        yield tools
        await tools.close()

    return open_server


async def call(session: ServerSession) -> tuple[str, bool]:
    """Return the text of a call, and whether it is an error."""
    reply = await session.call("lookup", {"key": "a"})
    return reply.text, reply.error


async def begun(tools: server.McpServer, name: str = "t") -> ServerSession:
    session = tools.session(TrajectoryInfo(id=name))
    await session.open()
    return session


LOST: dict[str, Answer] = {
    "the specification": GONE,
    "mcp 1.x": error(-32600, "Session not found", 404),
    "TypeScript": error(-32001, "Session not found", 404),
    "TypeScript's examples": error(-32000, "Bad Request: No valid session ID provided", 400),
    "TypeScript, restarted": error(-32000, "Bad Request: Server not initialized", 400),
    "Python, not initialized": error(-32602, "Invalid request parameters", data=""),
    "Rust": (401, "text/plain", b"Unauthorized: Session not found"),
    "Rust, without a session": (422, "text/plain", b"Unexpected message, expect initialize request"),
    "Go": (400, "text/plain", b"Invalid session ID"),
    "a gateway": (410, "application/json", b'{"detail": "expired"}'),
    "a web framework": (400, JSON, b'{"error": "Session not found"}'),
    "in a success": error(-32603, "session expired, please reconnect"),
}


HINTED = [
    {"name": name, "inputSchema": {"type": "object"}, "annotations": {hint: True}}
    for name, hint in (("read", "readOnlyHint"), ("put", "idempotentHint"), ("drop", "destructiveHint"))
]


@pytest.mark.parametrize(
    ("scope", "states"),
    [
        (Scope.SHARED, ["outside", "stateless", "stateless", "outside"]),
        (Scope.TRAJECTORY, ["replay", "stateless", "replay", "replay"]),
    ],
)
async def test_annotations_and_scope_say_what_a_tool_keeps(
    opened: Open, scope: Scope, states: list[str]
) -> None:
    remote = Server()
    remote.more = HINTED
    async with opened(remote, scope=scope) as tools:
        session = await begun(tools)
        assert [session.state_of(name) for name in ("lookup", "read", "put", "drop")] == states


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
async def test_concurrent_calls_open_one_new_session_and_succeed(opened: Open, lost: Answer) -> None:
    remote = Server(lost)
    async with opened(remote, scope=Scope.SHARED) as shared:
        sessions = [await begun(shared, f"t{number}") for number in range(8)]
        await asyncio.gather(*map(call, sessions))
        remote.forget()
        replies = await asyncio.gather(*map(call, sessions))
    assert replies == [("found", False)] * 8
    assert remote.opened == 2
    assert remote.called == ["s1"] * 8 + ["s2"] * 8


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((404, "text/plain", b"404 page not found"), "it rejects the request (HTTP 404): 404 page not found"),
        ((413, JSON, b'{"message": "long"}'), 'it rejects the request (HTTP 413): {"message": "long"}'),
        ((500, JSON, b'{"detail": "boom"}'), "lookup failed: the tool server kv stopped while it ran"),
        ((504, JSON, b'{"error": "timed out"}'), "lookup failed: the tool server kv stopped while it ran"),
        (error(-32603, "boom", 500), "boom"),
        ({"content": [], "isError": True}, "lookup reported an error without a message"),
    ],
)
async def test_an_error_of_a_gateway_and_one_without_words_are_named(
    opened: Open, answer: Answer | dict[str, Any], text: str
) -> None:
    async with opened(Server(failing=answer, names=False)) as tools:
        said, is_error = await call(await begun(tools))
    assert is_error
    assert said.startswith(text)


async def test_a_server_without_sessions_that_is_deployed_anew_is_called_again(opened: Open) -> None:
    remote = Server(names=False)
    away = remote.handle_async_request

    async def missing(request: httpx2.Request) -> httpx2.Response:
        if b'"initialize"' in request.content:
            remote.handle_async_request = away  # type: ignore[method-assign]
            return await away(request)
        return httpx2.Response(404, text="404 page not found")

    async with opened(remote) as tools:
        session = await begun(tools)
        await call(session)
        remote.handle_async_request = missing  # type: ignore[method-assign]
        assert await call(session) == ("found", False)
    assert remote.opened == 2


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
async def test_a_trajectory_whose_state_is_lost_is_not_continued(opened: Open, lost: Answer) -> None:
    remote = Server(lost)
    async with opened(remote, scope=Scope.TRAJECTORY) as own:
        session = await begun(own)
        remote.forget()
        assert (await call(session))[0] == "found", "no call was made in the session that was lost"
        remote.forget()
        with pytest.raises(SessionLostError, match="kv has lost the session of this trajectory"):
            await call(session)
        assert "its earlier state is lost" in (await call(session))[0]


async def test_what_setup_calls_made_in_a_shared_session_is_lost_with_it(opened: Open) -> None:
    remote = Server()
    hook = Hook(tool="lookup")
    async with opened(remote, scope=Scope.SHARED, setup=(hook,), teardown=(hook,)) as shared:
        session = await begun(shared)
        remote.forget()
        with pytest.raises(SessionLostError):
            await call(session)
        await session.close()


CODES = (-32000, -32001, -32002, -32050, *range(-32095, -32089), -32600, -32602, -32603, -32700, 1)


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        *((code, "file not found: a.txt", 200) for code in CODES),
        *((code, "Session not found: browser tab 7", 200) for code in (-32000, -32001, -32603)),
        (-32603, "upstream: Session terminated", 200),
        (-32602, "unknown argument", 400),
        (-32603, "x" * 5000, 200),
    ],
)
async def test_a_servers_own_error_is_its_words_whatever_its_code(
    opened: Open, code: int, words: str, status: int
) -> None:
    remote = Server(failing=error(code, words, status, data={"retry_after": 1, "login": True}))
    for scope in Scope:
        async with opened(remote, scope=scope) as tools:
            assert await call(await begun(tools)) == (words, True)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"error": "no such file"}, "no such file"),
        ({"error": {"message": "no such file"}}, "no such file"),
        ({"error": {"code": "ENOENT", "message": "no such file"}}, "no such file"),
        ({"error": {"code": 7}}, '{"code": 7}'),
    ],
)
async def test_an_error_without_a_code_or_words_is_read(opened: Open, answer: Any, text: str) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": None, **answer}).encode()
    async with opened(Server(failing=(200, JSON, body))) as tools:
        assert await call(await begun(tools)) == (text, True)


def framed(kind: str, body: bytes) -> bytes:
    return b"event: message\r\ndata: " + body + b"\r\n\r\n" if kind == "text/event-stream" else body


HALVES = {
    rb"page \ud83c": "page \ufffd", rb"page \udf78 end": "page \ufffd end",
    rb"\ud83c\ud83c\udf78": "\ufffd\U0001f378", rb"C:\\ud83c": r"C:\ud83c",
    b"caf\xc3": "caf\ufffd", b"half \xf0\x9f\x8d": "half \ufffd",
}  # fmt: skip


@pytest.mark.parametrize("kind", [JSON, "text/event-stream"])
@pytest.mark.parametrize("half", HALVES)
async def test_half_a_character_does_not_lose_the_result(opened: Open, kind: str, half: bytes) -> None:
    result = b'{"content": [{"type": "text", "text": "' + half + b'"}]}'
    numbers = itertools.count(1)

    class Cut(Server):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if b"tools/call" in request.content:
                number = json.loads(request.content)["id"]
                body = framed(kind, b'{"jsonrpc": "2.0", "id": %d, "result": %b}' % (number, result))
                return self._response((200, kind, gzip.compress(body) if next(numbers) % 2 else body))
            return await super().handle_async_request(request)

    async with opened(Cut()) as tools:
        for _ in range(2):
            assert await call(await begun(tools)) == (HALVES[half], False)


@pytest.mark.attack
async def test_a_compressed_answer_is_bounded_by_its_true_length(opened: Open) -> None:
    bomb = gzip.compress(b'{"jsonrpc": "2.0", "id": 1, "result": "' + b"x" * (MAX_MESSAGE_BYTES + 1) + b'"}')
    async with opened(Server(failing=(200, JSON, bomb))) as tools:
        assert await call(await begun(tools)) == ("the answer is longer than 8 MiB", True)
