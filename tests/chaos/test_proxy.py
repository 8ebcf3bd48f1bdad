"""The proxy forwards, resets, refuses, stalls and delays connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from chaos.proxy import HOST, Proxy

SECONDS = 10.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while chunk := await reader.read(4096):
            writer.write(chunk)
            await writer.drain()
    writer.close()


@pytest.fixture
async def proxied() -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy before a server that echoes, and its port."""
    server = await asyncio.start_server(echo, HOST, 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    yield proxy, await proxy.start()
    await proxy.close()
    server.close()


class Client:
    """One connection through a proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def echoes(self, text: bytes = b"x") -> bool:
        self.writer.write(text)
        await self.writer.drain()
        return await asyncio.wait_for(self.reader.readexactly(len(text)), SECONDS) == text

    async def is_gone(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(1), SECONDS) == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def test_the_proxy_forwards_both_directions_of_many_connections(proxied: tuple[Proxy, int]) -> None:
    async with connected(proxied[1]) as first, connected(proxied[1]) as second:
        assert await first.echoes(b"one")
        assert await second.echoes(bytes(range(256)) * 1000)


async def test_a_cut_resets_connections_and_refuses_new_ones_until_restore(
    proxied: tuple[Proxy, int],
) -> None:
    proxy, port = proxied
    async with connected(port) as open_before:
        assert await open_before.echoes()
        proxy.cut()
        assert await open_before.is_gone()
        async with connected(port) as during:
            assert await during.is_gone()
        proxy.restore()
        async with connected(port) as after:
            assert await after.echoes()


async def test_a_stall_delays_data_and_loses_none_and_a_delay_applies_to_both_directions(
    proxied: tuple[Proxy, int],
) -> None:
    proxy, port = proxied
    async with connected(port) as client:
        assert await client.echoes()
        proxy.stall()
        waiting = asyncio.create_task(client.echoes(b"later"))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        proxy.restore()
        assert await waiting
        proxy.latency = 0.05
        started = asyncio.get_running_loop().time()
        assert await client.echoes()
        assert asyncio.get_running_loop().time() - started >= 0.1


async def test_a_missing_server_ends_the_connection() -> None:
    server = await asyncio.start_server(echo, HOST, 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    server.close()
    async with connected(await proxy.start()) as client:
        assert await client.is_gone()
    await proxy.close()


@pytest.mark.parametrize("open_connections", [0, 3])
async def test_closing_ends_every_connection(proxied: tuple[Proxy, int], open_connections: int) -> None:
    proxy, port = proxied
    clients = [Client(*await asyncio.open_connection(HOST, port)) for _ in range(open_connections)]
    for client in clients:
        assert await client.echoes()
    await proxy.close()
    for client in clients:
        assert await client.is_gone()
        client.writer.transport.abort()
