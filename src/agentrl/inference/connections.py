"""Send requests over kept HTTP/1.1 connections and read each answer as it comes.

A general HTTP client costs about a millisecond of CPU for a model call; h11 over asyncio's streams a tenth.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

_PIECE = 64 * 1024
_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0
"""Below the 5 s after which uvicorn closes an idle connection."""


@dataclass(slots=True)
class Connection:
    """One connection, which carries one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: h11.Connection
    used_at: float

    @property
    def is_usable(self) -> bool:
        """Return whether another request may be sent on it."""
        is_recent = time.monotonic() - self.used_at < _KEEP_ALIVE_SECONDS
        return is_recent and not self.reader.at_eof() and not self.writer.is_closing()

    async def next_event(self) -> h11.Event | type[h11.PAUSED]:
        """Return the next part of the answer. Raises h11.RemoteProtocolError and OSError."""
        while (event := self.protocol.next_event()) is h11.NEED_DATA:
            self.protocol.receive_data(await self.reader.read(_PIECE))
        return event  # type: ignore[return-value]


@dataclass(slots=True)
class Answer:
    """An answer whose head has arrived; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    _connection: Connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        while isinstance(event := await self._connection.next_event(), h11.Data):
            yield bytes(event.data)


class Connections:
    """The connections to one server: as many as requests run at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._is_encrypted = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_encrypted else 80)
        self._prefix = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        self._idle: list[Connection] = []
        self._is_closed = False

    async def close(self) -> None:
        """Close the idle connections; one in use is closed after its request."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().writer.close()

    @asynccontextmanager
    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Answer]:
        """Send a request and yield its answer. Raises OSError, TimeoutError and h11.ProtocolError.

        The connection is kept if the body was read to its end.
        """
        connection = await self._connection()
        try:
            sent = {"host": self._netloc, "content-length": str(len(body)), **headers}
            request = h11.Request(method="POST", target=self._prefix + path, headers=list(sent.items()))
            send = connection.protocol.send
            connection.writer.write(
                b"".join(filter(None, (send(request), send(h11.Data(data=body)), send(h11.EndOfMessage()))))
            )
            await connection.writer.drain()
            yield await self._answer(connection)
        finally:
            self._release(connection)

    async def _answer(self, connection: Connection) -> Answer:
        while not isinstance(event := await connection.next_event(), h11.Response):
            pass  # an informational answer; h11 raises if the server closes the connection
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        return Answer(event.status_code, headers, connection)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.writer.close()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=True if self._is_encrypted else None, limit=2 * _PIECE
                )
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {_CONNECT_SECONDS:g} s") from error
        return Connection(reader, writer, h11.Connection(h11.CLIENT), time.monotonic())

    def _release(self, connection: Connection) -> None:
        states = connection.protocol.our_state, connection.protocol.their_state
        if self._is_closed or states != (h11.DONE, h11.DONE):
            connection.writer.close()
            return
        connection.protocol.start_next_cycle()
        connection.used_at = time.monotonic()
        self._idle.append(connection)
