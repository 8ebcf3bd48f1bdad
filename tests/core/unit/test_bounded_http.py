"""HTTP servers: bounded connections, and no answer to pages of other sites."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from agentrl.base import bounded_http
from agentrl.base.bounded_http import BoundedProtocol, for_own_hosts, is_loopback, server_config

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
WRITERS: dict[asyncio.StreamReader, asyncio.StreamWriter] = {}
"""The open ends of the clients."""

pytestmark = pytest.mark.attack


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server of one page."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(PlainTextResponse("here"), http=BoundedProtocol, lifespan="off"))
    task = asyncio.create_task(server.serve([listener]))
    yield listener.getsockname()[1]
    for writer in WRITERS.values():
        writer.close()
    WRITERS.clear()
    server.should_exit = True
    await task


async def _open(port: int, sent: bytes) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    WRITERS[reader] = writer
    return reader


async def _ended(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""


async def test_a_connection_without_a_whole_header_is_closed(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bounded_http, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(BoundedProtocol, "_logged", -60.0)
    answered = await _open(port, REQUEST)
    half = [await _open(port, sent) for sent in (b"", b"GET / HTTP/1.1\r\n", REQUEST + b"GET /")]
    with caplog.at_level(logging.WARNING, "agentrl.base.bounded_http"):
        ends = [await _ended(reader) for reader in half]
    assert [end.endswith(b"here") for end in ends] == [False, False, True]
    assert [record.name for record in caplog.records].count("agentrl.base.bounded_http") == 1
    WRITERS[answered].write(REQUEST)  # idle between requests is no half-open one
    assert b"here" in await asyncio.wait_for(answered.readuntil(b"here"), 20)


async def test_too_many_half_open_connections_do_not_keep_a_client_out(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "connection_limit", lambda: 4)
    half = [await _open(port, b"GET /") for _ in range(6)]
    client = await _open(port, REQUEST)
    assert b"here" in await asyncio.wait_for(client.readuntil(b"here"), 20)
    assert [await _ended(reader) for reader in half[:3]] == [b"", b"", b""]


def test_a_server_leaves_the_log_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    handler = logging.NullHandler()
    monkeypatch.setattr(handler, "close", lambda: closed.append(handler))
    server_config(PlainTextResponse("here"))
    assert closed == []


def client(host: str, *names: str) -> TestClient:
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("ok"), methods=["POST"])])
    return TestClient(for_own_hosts(app, host, *names), base_url="http://127.0.0.1:8790")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200), ({"host": "localhost:8790"}, 200), ({"host": "[::1]:8790"}, 200),
        ({"host": "LOCALHOST."}, 200), ({"host": "chat.example:1", "origin": "https://chat.example"}, 200),
        ({"origin": "http://127.0.0.1:8790"}, 200), ({"origin": "http://localhost:3000"}, 200),
        ({"host": "evil.example:8790"}, 421), ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "localhost.evil.example"}, 421), ({"host": ""}, 421),
        ({"origin": "http://evil.example"}, 421), ({"origin": "http://203.0.113.5"}, 421),
        ({"origin": "http://localhost@evil.example"}, 421), ({"origin": "null"}, 421), ({"origin": ""}, 421),
        ({"origin": "http://[::1"}, 421), ({"origin": "file://"}, 421),
        ({"host": "evil.example", "x-forwarded-host": "localhost"}, 421),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
    ],
)  # fmt: skip
def test_a_loopback_server_answers_its_own_machine_alone(headers: dict[str, str], status: int) -> None:
    answer = client("127.0.0.1", "chat.example").post("/", headers=headers)
    assert answer.status_code == status, answer.text


def test_an_address_that_others_reach_has_names_that_are_not_known() -> None:
    assert client("0.0.0.0").post("/", headers={"host": "any.example"}).status_code == 200
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "example")] == [
        True, True, True, False, False,
    ]  # fmt: skip
