"""A TCP proxy between a process and the database that can reset, stall and delay connections."""

from __future__ import annotations

import asyncio
import contextlib

HOST = "127.0.0.1"
_CHUNK_BYTES = 65_536
_CONNECT_SECONDS = 5.0


class Proxy:
    """Listens on a free port and forwards to ``port``, both on 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self.latency = 0.0
        """Delay of every chunk, in seconds."""

    async def start(self) -> int:
        """Start listening; return the port."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and reset all connections."""
        if self._server is not None:
            self._server.close()
        self._reset()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def cut(self) -> None:
        """Reset all connections, and every new one until ``restore``."""
        self._refusing = True
        self._reset()

    def stall(self) -> None:
        """Transfer nothing until ``restore``; connections stay open, and new ones are accepted."""
        self._flowing.clear()

    def restore(self) -> None:
        """Transfer data normally again."""
        self._refusing = False
        self.latency = 0.0
        self._flowing.set()

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        self._writers.add(writer)
        try:
            if not self._refusing:
                await self._forward(reader, writer)
        except (OSError, TimeoutError):
            pass  # one end has closed the connection
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._handlers.discard(handler)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_CONNECT_SECONDS):
            answers, requests = await asyncio.open_connection(HOST, self._target)
        self._writers.add(requests)
        pumps = [
            asyncio.create_task(self._pump(reader, requests)),
            asyncio.create_task(self._pump(answers, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            requests.transport.abort()
            self._writers.discard(requests)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(_CHUNK_BYTES):
                await self._flowing.wait()
                if self.latency:
                    await asyncio.sleep(self.latency)
                sink.write(chunk)
                await sink.drain()
