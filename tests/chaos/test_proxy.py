"""The proxy forwards, resets, refuses, stalls and delays connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from chaos.proxy import HOST, Proxy

SECONDS = 10.0


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(4096):
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Client:
    """One connection through a proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, text: bytes) -> bytes:
        self.writer.write(text)
        await self.writer.drain()
        return await asyncio.wait_for(self.reader.readexactly(len(text)), SECONDS)

    async def is_gone(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(1), SECONDS) == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, int]]:
    async with echo() as target:
        proxy = Proxy(target)
        port = await proxy.start()
        try:
            yield proxy, port
        finally:
            await proxy.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def test_the_proxy_forwards_both_directions_of_many_connections() -> None:
    async with proxied() as (_, port), connected(port) as first, connected(port) as second:
        large = bytes(range(256)) * 1000
        assert await first.say(b"one") == b"one"
        assert await second.say(large) == large


async def test_a_cut_resets_connections_and_refuses_new_ones_until_restore() -> None:
    async with proxied() as (proxy, port), connected(port) as open_before:
        assert await open_before.say(b"x") == b"x"
        proxy.cut()
        assert await open_before.is_gone()
        async with connected(port) as during:
            assert await during.is_gone()
        proxy.restore()
        async with connected(port) as after:
            assert await after.say(b"x") == b"x"


async def test_a_stall_delays_data_and_loses_none() -> None:
    async with proxied() as (proxy, port), connected(port) as client:
        assert await client.say(b"x") == b"x"
        proxy.stall()
        waiting = asyncio.create_task(client.say(b"later"))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        proxy.restore()
        assert await waiting == b"later"


async def test_a_delay_applies_to_both_directions() -> None:
    async with proxied() as (proxy, port), connected(port) as client:
        proxy.latency = 0.05
        started = asyncio.get_running_loop().time()
        assert await client.say(b"x") == b"x"
        assert asyncio.get_running_loop().time() - started >= 0.1


async def test_a_missing_server_ends_the_connection() -> None:
    async with echo() as target:
        port_of_nobody = target
    proxy = Proxy(port_of_nobody)
    async with connected(await proxy.start()) as client:
        assert await client.is_gone()
    await proxy.close()


@pytest.mark.parametrize("open_connections", [0, 3])
async def test_closing_ends_every_connection(open_connections: int) -> None:
    async with proxied() as (proxy, port):
        clients = [await asyncio.open_connection(HOST, port) for _ in range(open_connections)]
        for reader, writer in clients:
            assert await Client(reader, writer).say(b"x") == b"x"
        await proxy.close()
        for reader, writer in clients:
            assert await Client(reader, writer).is_gone()
            writer.transport.abort()
