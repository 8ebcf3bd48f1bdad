"""Choose a request's proxy from the environment, for httpx2 and for the client of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest

from agentrl.base.proxies import ProxiedTransport, proxy_of
from agentrl.errors import EngineError
from agentrl.inference.http import EngineHttp

PROXY = "http://proxy.test:3128"
NO_PROXY = "example.org, .internal,10.0.0.0/8,[fd00::1],db.test:27017,fe80::/10"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("url", "is_direct"),
    [
        ("http://127.0.0.1:8000/v1", True), ("http://127.8.8.8:8000/v1", True),
        ("http://localhost:30000", True), ("http://engine.localhost", True), ("http://[::1]:30000", True),
        ("ws://127.0.0.1:8000/ws", True), ("http://example.org/a", True), ("https://www.example.org", True),
        ("http://judge.internal", True), ("http://10.1.2.3:30000", True), ("http://[fd00::1]:80", True),
        ("http://[fe80::7]", True), ("http://db.test:27017", True), ("http://db.test:80", False),
        ("http://notexample.org", False), ("http://11.1.2.3", False), ("https://api.openai.com/v1", False),
        ("wss://games.test/ws", False),
    ],
)  # fmt: skip
def test_this_machine_and_no_proxy_are_direct(
    environment: pytest.MonkeyPatch, url: str, is_direct: bool
) -> None:
    assert proxy_of(url) is None
    environment.setenv("HTTP_PROXY", PROXY)
    environment.setenv("https_proxy", PROXY)
    environment.setenv("NO_PROXY", NO_PROXY)
    assert proxy_of(url) == (None if is_direct else PROXY)
    environment.setenv("no_proxy", "*")
    assert proxy_of(url) is None


def test_all_proxy_and_a_proxy_without_a_scheme(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("ALL_PROXY", "proxy.test:3128")
    assert proxy_of("http://judge.test") == proxy_of("https://judge.test") == PROXY
    environment.setenv("https_proxy", "http://other.test:1")
    assert proxy_of("https://judge.test") == "http://other.test:1"


@asynccontextmanager
async def proxy(answer: bytes) -> AsyncIterator[tuple[str, list[str]]]:
    """Yield the address of a proxy that answers each request alike, and the heads that it got."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


HEADERS = b"content-type: application/json\r\ncontent-length: 2\r\nconnection: close"
JSON = b"HTTP/1.1 200 OK\r\n" + HEADERS + b"\r\n\r\n{}"


async def test_both_kinds_of_clients_send_through_the_proxy(environment: pytest.MonkeyPatch) -> None:
    async with proxy(JSON) as (address, heads):
        environment.setenv("http_proxy", f"http://ann:p%40ss@{address}")
        async with httpx2.AsyncClient(transport=ProxiedTransport()) as client:
            assert (await client.get("http://judge.test/v1/models")).json() == {}
        engine = EngineHttp("http://engine.test:30000/base")
        assert await engine.call("GET", "/health") == {}
        await engine.close()
    assert heads[0].startswith("GET http://judge.test/v1/models HTTP/1.1\r\n")
    address = "engine.test:30000"
    assert heads[1].startswith(f"GET http://{address}/base/health HTTP/1.1\r\nhost: {address}\r\n")
    assert all("proxy-authorization: basic yw5uonbac3m=" in head.lower() for head in heads)


@pytest.mark.parametrize(
    ("scheme", "answer", "problem"),
    [
        ("http", b"HTTP/1.1 403 No\r\n\r\n", "answers 'HTTP/1.1 403 No' to CONNECT engine.test:443"),
        ("http", b"", "gives no answer to CONNECT engine.test:443"),
        ("socks5", b"", "is not an HTTP proxy"),
    ],
)
async def test_a_proxy_that_reaches_no_engine_is_named_without_its_password(
    environment: pytest.MonkeyPatch, scheme: str, answer: bytes, problem: str
) -> None:
    async with proxy(answer) as (address, _):
        environment.setenv("https_proxy", f"{scheme}://ann:secret@{address}")
        engine = EngineHttp("https://engine.test")
        with pytest.raises(EngineError) as failed:
            await engine.call("GET", "/health")
    assert f"the proxy {scheme}://{address} {problem}" in str(failed.value)
    assert "name engine.test in no_proxy" in str(failed.value)
    assert "secret" not in str(failed.value)
