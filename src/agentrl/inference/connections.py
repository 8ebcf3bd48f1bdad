"""Send requests over kept HTTP/1.1 connections and read each answer as it comes.

Why not httpx2, which sends all other requests? A turn of a rollout then costs 2.7 ms of CPU instead of 1.8
(``scripts/bench/rollout.py --only cpu-6k``, three runs of each, two cores).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

_PIECE = 64 * 1024
_LARGEST_HEAD = 64 * 1024
_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0
"""Below the 5 s after which uvicorn closes an idle connection."""

_NOT_IN_HEAD = re.compile(r"[\r\n\0]")


class Incoming:
    """The answer to one request as its bytes arrive. The methods ``on_…`` are called by httptools."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        """Parts of the body that nobody has read."""
        self.has_head = False
        self.is_complete = False
        self.keeps_connection = False
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse received bytes; none at the end of the connection. Raises ConnectionError."""
        if not data:
            self._end()
            return
        if not self.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ConnectionError(f"the answer is not HTTP/1.1: {error}") from error
        if not self.has_head and self._head_bytes > _LARGEST_HEAD:
            raise ConnectionError(f"the answer's head is longer than {_LARGEST_HEAD} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Take the status; an informational answer precedes the real one."""
        self.status = self._parser.get_status_code()
        self.has_head = self.status >= 200

    def on_body(self, piece: bytes) -> None:
        """Take a part of the body."""
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        if not self.has_head:
            self.headers.clear()
            return
        self.is_complete = True
        self.keeps_connection = self._parser.should_keep_alive()

    def on_message_begin(self) -> None:
        """Refuse to keep a connection that sends more than the answer."""
        self.keeps_connection = False

    def _end(self) -> None:
        """End a body whose length only the end of the connection tells."""
        has_length = "content-length" in self.headers or "transfer-encoding" in self.headers
        if not self.has_head or has_length:
            raise ConnectionError("the server closed the connection before the end of its answer")
        self.is_complete = True


@dataclass(slots=True)
class Connection:
    """One connection, which carries one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used_at: float

    @property
    def is_usable(self) -> bool:
        """Return whether another request may be sent on it."""
        is_recent = time.monotonic() - self.used_at < _KEEP_ALIVE_SECONDS
        return is_recent and not self.reader.at_eof() and not self.writer.is_closing()


@dataclass(slots=True)
class Answer:
    """An answer whose head has arrived; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    _incoming: Incoming = field(repr=False)
    _reader: asyncio.StreamReader = field(repr=False)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises OSError."""
        incoming = self._incoming
        while True:
            arrived, incoming.pieces = incoming.pieces, []
            for piece in arrived:
                yield piece
            if incoming.is_complete:
                return
            incoming.feed(await self._reader.read(_PIECE))


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
        """Send a request and yield its answer. Raises OSError, and ValueError for a header with a line break.

        The connection is kept if the whole answer has arrived.
        """
        head = self._head(path, {"host": self._netloc, "content-length": str(len(body)), **headers})
        connection = await self._connection()
        incoming = Incoming()
        try:
            connection.writer.writelines((head, body))
            await connection.writer.drain()
            while not incoming.has_head:
                incoming.feed(await connection.reader.read(_PIECE))
            yield Answer(incoming.status, incoming.headers, incoming, connection.reader)
        finally:
            self._release(connection, incoming)

    def _head(self, path: str, headers: Mapping[str, str]) -> bytes:
        lines = [
            f"POST {self._prefix}{path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        for line in lines:
            if _NOT_IN_HEAD.search(line):
                raise ValueError(f"a line break in the head of a request: {line[:100]!r}")
        return "\r\n".join([*lines, "\r\n"]).encode("latin-1")

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
        return Connection(reader, writer, time.monotonic())

    def _release(self, connection: Connection, incoming: Incoming) -> None:
        if self._is_closed or not incoming.is_complete or not incoming.keeps_connection:
            connection.writer.close()
            return
        connection.used_at = time.monotonic()
        self._idle.append(connection)
