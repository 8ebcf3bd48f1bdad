"""Speak HTTP/1.1 to an engine over kept connections: JSON calls, and streams of server-sent events.

Why not httpx2? A turn of a rollout then costs 2.7 ms of CPU instead of 1.8 (``scripts/bench/rollout.py --only
cpu-6k``, three runs of each, two cores).
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import httptools
import orjson

from agentrl.base.proxies import proxy_of
from agentrl.errors import ENGINES, EngineError
from agentrl.inference.engine import EngineRefusedError, malformed

CONTROL_SECONDS = 30.0
_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0
"""Below the 5 s after which uvicorn closes an idle connection."""
_END_SECONDS = 1.0
"""How long a server may take to end a stream after ``[DONE]``."""
_SLACK = 0.02
"""Fraction of a stream's time limit by which it may be late: not every event moves the timer."""
_PIECE = 64 * 1024
_LARGEST_HEAD = 64 * 1024
LARGEST_ANSWER = 256 * 1024 * 1024
"""Most bytes of an event, and of an answer that is not a stream. A mixture's routing has 4 KiB a token."""
_EXCERPT = 300
_JSON = {"content-type": "application/json"}
_DATA, _DONE = b"data:", b"[DONE]"
_NOT_IN_HEAD = re.compile(r"[\r\n\0]")


class Incoming:
    """The answer to one request as it arrives; httptools calls ``on_…``. Header names are in lower case."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.has_begun = False
        self.has_head = False
        self.is_complete = False
        self.keeps_connection = False
        self._reader = reader
        self._pieces: list[bytes] = []
        """Parts of the body that nobody has read."""
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0

    async def read(self) -> None:
        """Read and parse what arrives next. Raises ConnectionError."""
        data = await self._reader.read(_PIECE)
        self.has_begun = self.has_begun or bool(data)
        if not data:
            # Take the end of the connection for the end of a body without a length, as HTTP/1.1 does.
            has_length = "content-length" in self.headers or "transfer-encoding" in self.headers
            if not self.has_head or has_length:
                raise ConnectionError("the server closed the connection before the end of its answer")
            self.is_complete = True
            return
        if not self.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ConnectionError(f"the answer is not HTTP/1.1: {error}") from error
        if not self.has_head and self._head_bytes > _LARGEST_HEAD:
            raise ConnectionError(f"the answer's head is longer than {_LARGEST_HEAD} bytes")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises OSError."""
        while True:
            arrived, self._pieces = self._pieces, []
            for piece in arrived:
                yield piece
            if self.is_complete:
                return
            await self.read()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Take the status; an informational answer precedes the real one."""
        self.status = self._parser.get_status_code()
        self.has_head = self.status >= 200

    def on_body(self, piece: bytes) -> None:
        """Take a part of the body."""
        self._pieces.append(piece)

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


@dataclass(slots=True)
class EngineConnection:
    """One connection, which carries one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used_at: float | None = None
    """When its last answer ended; None before the first."""


class Connections:
    """The connections to one server: as many as requests run at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._is_encrypted = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_encrypted else 80)
        self._prefix = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        self._proxy = proxy_of(url)
        self._authorization: list[str] = []
        if self._proxy is not None and (user := urlsplit(self._proxy)).username is not None:
            secret = f"{unquote(user.username or '')}:{unquote(user.password or '')}".encode()
            self._authorization = [f"proxy-authorization: Basic {b64encode(secret).decode()}"]
        is_forwarded = self._proxy is not None and not self._is_encrypted
        if is_forwarded:
            self._prefix = f"http://{self._netloc}{self._prefix}"
        self._forwarded = self._authorization if is_forwarded else []
        """Headers for a proxy that reads the request; one of an encrypted connection reads CONNECT only."""
        self._idle: list[EngineConnection] = []
        self._is_closed = False

    async def close(self) -> None:
        """Close the idle connections; one in use is closed after its request."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().writer.close()

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Incoming]:
        """Send a request; yield its answer, whose head has arrived.

        The connection is kept if the whole answer has arrived. Raises OSError, and ValueError for a header
        with a line break.
        """
        lines = [
            f"{method} {self._prefix}{path} HTTP/1.1",
            f"host: {self._netloc}",
            f"content-length: {len(body)}",
            *self._forwarded,
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if (broken := next(filter(_NOT_IN_HEAD.search, lines), None)) is not None:
            raise ValueError(f"a line break in the head of a request: {broken[:100]!r}")
        connection, answer = await self._send("\r\n".join([*lines, "\r\n"]).encode("latin-1"), body)
        try:
            while not answer.has_head:
                await answer.read()
            yield answer
        finally:
            if self._is_closed or not answer.is_complete or not answer.keeps_connection:
                connection.writer.close()
            else:
                connection.used_at = time.monotonic()
                self._idle.append(connection)

    async def _send(self, head: bytes, body: bytes) -> tuple[EngineConnection, Incoming]:
        """Send a request; return its connection and its answer, which has begun to arrive.

        A kept connection that ends before was closed while it was idle, and another one is used. As a failure
        of the engine, all trajectories would avoid it for a while.
        """
        while True:
            connection = await self._connection()
            answer = Incoming(connection.reader)
            try:
                connection.writer.writelines((head, body))
                await connection.writer.drain()
                await answer.read()
                return connection, answer
            except BaseException as error:
                connection.writer.close()
                is_stale = isinstance(error, ConnectionError) and connection.used_at is not None
                if not is_stale or answer.has_begun:
                    raise

    async def _connection(self) -> EngineConnection:
        while self._idle:
            connection = self._idle.pop()
            is_recent = time.monotonic() - (connection.used_at or 0.0) < _KEEP_ALIVE_SECONDS
            if is_recent and not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                if self._proxy is None:
                    reader, writer = await asyncio.open_connection(
                        self._host, self._port, ssl=True if self._is_encrypted else None, limit=2 * _PIECE
                    )
                else:
                    reader, writer = await self._through(urlsplit(self._proxy))
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {_CONNECT_SECONDS:g} s") from error
        return EngineConnection(reader, writer)

    async def _through(self, proxy: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a proxy; for an encrypted connection, through it. Raises ConnectionError."""
        named = f"the proxy {proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"
        direct = f"name {self._host} in no_proxy to connect directly"
        if proxy.scheme not in ("http", "https") or proxy.hostname is None:
            raise ConnectionError(f"{named} is not an HTTP proxy; {direct}")
        is_secret = proxy.scheme == "https"
        try:
            reader, writer = await asyncio.open_connection(
                proxy.hostname,
                proxy.port or (443 if is_secret else 80),
                ssl=True if is_secret else None,
                limit=2 * _PIECE,
            )
        except OSError as error:
            raise ConnectionError(f"{named} is not reached: {error}; {direct}") from error
        if not self._is_encrypted:
            return reader, writer
        target = f"{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"
        lines = [f"CONNECT {target} HTTP/1.1", f"host: {target}", *self._authorization, "\r\n"]
        writer.write("\r\n".join(lines).encode("latin-1"))
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            status = head.partition(b"\r\n")[0].decode("latin-1")
            if f"{status} ".split(" ")[1] != "200":
                raise ConnectionError(f"{named} answers {status!r} to CONNECT {target}; {direct}")
            await writer.start_tls(ssl.create_default_context(), server_hostname=self._host)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            writer.close()
            raise ConnectionError(f"{named} gives no answer to CONNECT {target}; {direct}") from error
        except BaseException:
            writer.close()
            raise
        return reader, writer


class EngineHttp:
    """The HTTP connections to one server. Methods raise EngineError with url, status and answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        """What is requested, and what errors and documents name: no user, password or query is sent."""
        self._connections = Connections(self.url)

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = CONTROL_SECONDS
    ) -> dict[str, Any]:
        """Return the JSON object of an answer; an empty dict for an empty or plain-text one."""
        kind, content = await self.respond(method, path, body, timeout)
        if "html" in kind:
            raise malformed(f"{self.url}{path}", f"with a web page: {_text(content)}")
        if "json" not in kind:
            return {}
        answer = _parse(content, f"{self.url}{path}")
        return answer if isinstance(answer, dict) else {"value": answer}

    async def respond(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = CONTROL_SECONDS,
        *,
        statuses: Collection[int] = (200,),
    ) -> tuple[str, bytes]:
        """Return the content type and the content of an answer whose status is one of ``statuses``.

        Any other status is raised, 4xx as EngineRefusedError. ``timeout`` limits the whole call, in seconds.
        """
        where, content = f"{self.url}{path}", b"" if body is None else orjson.dumps(body)
        try:
            async with (
                asyncio.timeout(timeout),
                self._connections.request(method, path, content, _JSON if content else {}) as answer,
            ):
                received = await _limited(answer.pieces(), where)
        except TimeoutError as error:
            raise EngineError(
                f"engine {where} did not answer within {timeout:g} s", outage=ENGINES
            ) from error
        except (OSError, ValueError) as error:
            raise _unreachable(where, error) from error
        if answer.status not in statuses:
            raise refusal(where, answer.status, _text(received))
        return answer.headers.get("content-type", ""), received

    async def stream(
        self, path: str, body: bytes, timeout: float, headers: Mapping[str, str]
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the JSON objects of a stream of events until ``[DONE]`` or the end of the stream.

        ``timeout`` limits the wait for each event, in seconds. An answer that is one JSON object is yielded
        as one event.
        """
        where = f"{self.url}{path}"
        loop = asyncio.get_running_loop()
        is_done = False
        slack = timeout * _SLACK
        due = loop.time() + slack
        try:
            async with (
                asyncio.timeout(timeout + slack) as clock,
                self._connections.request("POST", path, body, {**_JSON, **headers}) as answer,
            ):
                kind = answer.headers.get("content-type", "")
                if answer.status != 200 or "event-stream" not in kind:
                    whole = await _limited(answer.pieces(), where)
                    if answer.status != 200:
                        raise refusal(where, answer.status, _text(whole))
                    if "json" not in kind:
                        raise malformed(where, f"with {kind or 'no content type'}: {_text(whole)}")
                    yield _object(whole, where)
                    return
                async for data in _events(answer.pieces(), where):
                    if is_done:
                        continue  # the connection is kept only if all is read
                    is_done = data == _DONE
                    now = loop.time()
                    if is_done:
                        clock.reschedule(now + _END_SECONDS)
                        continue
                    if now >= due:
                        clock.reschedule(now + timeout + slack)
                        due = now + slack
                    yield _object(data, where)
        except TimeoutError as error:
            # Let a server be late to end its stream: behind [DONE] only the connection is lost, no token.
            if not is_done:
                raise silent(where, timeout) from error
        except OSError as error:
            raise _unreachable(where, error) from error


async def _limited(pieces: AsyncIterator[bytes], where: str) -> bytes:
    """Return the joined pieces. Raises EngineAnswerError for more than ``LARGEST_ANSWER`` bytes."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > LARGEST_ANSWER:
            raise malformed(where, f"with more than {LARGEST_ANSWER} bytes")
    return bytes(body)


async def _events(pieces: AsyncIterator[bytes], where: str) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event; ignore comments and other fields."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        if len(rest) > LARGEST_ANSWER:
            raise malformed(where, f"with an event of more than {LARGEST_ANSWER} bytes")
        if b"\n" not in piece:
            continue  # a split copies what is there: once per line, not once per piece
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield bytes(line[len(_DATA) :]).strip()
            elif line.strip() and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise malformed(where, f"with a line that is not an event: {bytes(line[:_EXCERPT])!r}")


def _object(data: bytes, where: str) -> dict[str, Any]:
    if isinstance(answer := _parse(data, where), dict):
        return answer
    raise malformed(where, f"with JSON that is not an object: {data[:_EXCERPT]!r}")


def _parse(data: bytes, where: str) -> Any:
    try:
        return orjson.loads(data)
    except ValueError as error:
        raise malformed(where, f"invalid JSON: {data[:_EXCERPT]!r}") from error


def _text(body: bytes) -> str:
    """Return the beginning of a body, with a replacement character for each byte that is not UTF-8."""
    # Cut before decoding: an error page may have LARGEST_ANSWER bytes, and a character at most four.
    return body[: 4 * _EXCERPT].decode("utf-8", "replace")[:_EXCERPT]


def silent(where: str, seconds: float) -> EngineError:
    """Return the error for a stream at the address ``where`` without a token for ``seconds``."""
    return EngineError(f"engine {where} sent no token for {seconds:g} s", outage=ENGINES)


def refusal(where: str, status: Any, text: str) -> EngineError:
    """Return the error for an answer at the address ``where``, or an event of a stream, of this status."""
    message = f"engine {where} answered {status}: {text[:_EXCERPT]}"
    # Leave 408 and 429 out: they refuse the moment, not the request, so that a retry helps.
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
        return EngineRefusedError(message)
    return EngineError(message, outage=ENGINES)


def _unreachable(where: str, error: Exception) -> EngineError:
    return EngineError(
        f"engine {where} cannot be reached: {type(error).__name__}: {error}",
        hint="see the engine's log; `agentrl audit run` lists the live engines",
        outage=ENGINES,
    )
