"""Check that connections are kept only after a whole answer, and that a closed one is not used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentrl.inference.http import Connections, EngineHttp

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
EVENTS = b'data: {"a": 1}\n\ndata: [DONE]\n\n'
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n0\r\n\r\n" % (len(EVENTS), EVENTS)
)  # fmt: skip


class Server:
    """Answers every request with ``answer``; closes the connection after it if ``closes``."""

    def __init__(self) -> None:
        self.answer = PLAIN
        self.closes = False
        self.drops = 0
        """Requests that get no answer, but the end of their connection."""
        self.connections = 0
        self.requests: list[bytes] = []
        self.closed = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                self.requests.append(head + await reader.readexactly(int(length.split(b":")[1])))
                if self.drops:
                    self.drops -= 1
                    break
                writer.write(self.answer)
                if self.closes:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()
        self.closed.set()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    listening = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, asyncio.timeout(20):
        yield found


@pytest.fixture
async def connections(server: Server) -> AsyncIterator[Connections]:
    opened = Connections(server.url)
    yield opened
    await opened.close()


async def ask(connections: Connections) -> bytes:
    async with connections.request("POST", "/x", b"{}", {"content-type": "text/plain"}) as answer:
        assert (answer.status, answer.headers["content-type"]) == (200, "text/plain")
        return b"".join([piece async for piece in answer.pieces()])


async def test_a_connection_is_kept_after_a_whole_answer(server: Server) -> None:
    connections = Connections(f"{server.url}/prefix/")
    assert [await ask(connections) for _ in range(3)] == [b"hello"] * 3
    assert server.connections == 1
    assert server.requests[0].startswith(b"POST /prefix/x HTTP/1.1\r\n")
    assert server.requests[0].endswith(b"\r\n\r\n{}")
    await asyncio.gather(*(ask(connections) for _ in range(3)))
    assert server.connections == 3
    await connections.close()


async def test_a_connection_that_the_server_closed_is_not_used_again(
    server: Server, connections: Connections
) -> None:
    server.closes = True
    for _ in range(3):
        assert await ask(connections) == b"hello"
        await server.closed.wait()
        await asyncio.sleep(0.01)  # the end of the connection arrives
    assert server.connections == 3


async def test_a_connection_that_ends_while_a_request_is_sent_is_replaced(
    server: Server, connections: Connections
) -> None:
    await asyncio.gather(*(ask(connections) for _ in range(3)))
    server.drops = 3
    assert await ask(connections) == b"hello"
    assert server.connections == 4
    assert len(server.requests) == 7
    # A new connection that ends is a failure of the server, and so is half an answer.
    server.closes = True
    assert await ask(connections) == b"hello"
    await server.closed.wait()
    await asyncio.sleep(0.01)
    server.drops = 1
    with pytest.raises(ConnectionError, match="closed the connection"):
        await ask(connections)
    server.closes = False
    assert await ask(connections) == b"hello"
    server.answer, server.closes, count = PLAIN[:9], True, len(server.requests)
    with pytest.raises(ConnectionError, match="closed the connection"):
        await ask(connections)
    assert len(server.requests) == count + 1


async def test_a_connection_with_half_an_answer_is_closed(server: Server, connections: Connections) -> None:
    server.answer = PLAIN[:-2]
    async with connections.request("POST", "/x", b"", {}) as answer:
        assert answer.status == 200
    await server.closed.wait()
    server.answer = PLAIN
    assert await ask(connections) == b"hello"


async def test_a_stream_is_read_to_its_end_and_keeps_its_connection(server: Server) -> None:
    server.answer = STREAM
    http = EngineHttp(server.url)
    for _ in range(3):
        assert [event async for event in http.stream("/generate", b"{}", 5.0, {})] == [{"a": 1}]
    assert server.connections == 1
    await http.close()


async def test_what_is_not_http_is_an_error(server: Server, connections: Connections) -> None:
    server.answer = b"hello\r\n\r\n"
    with pytest.raises(ConnectionError, match=r"is not HTTP/1\.1"):
        await ask(connections)
    server.answer = b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000
    with pytest.raises(ConnectionError, match="longer than 65536 bytes"):
        await ask(connections)
    server.answer, server.closes = b"", True
    with pytest.raises(ConnectionError, match="closed the connection before the end"):
        await ask(connections)
    server.answer = PLAIN[:-2]
    with pytest.raises(ConnectionError, match="closed the connection before the end"):
        await ask(connections)


@pytest.mark.parametrize(
    ("answer", "made"),
    [
        (b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\n" + PLAIN, 1),
        (PLAIN.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), 2),
        (PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"), 2),
        (PLAIN + b"HTTP/1.1 200 more", 2),
    ],
    ids=["behind an informational answer", "connection: close", "HTTP/1.0", "more than the answer"],
)
async def test_a_connection_is_kept_unless_the_server_will_close_it(
    server: Server, connections: Connections, answer: bytes, made: int
) -> None:
    server.answer = answer
    assert [await ask(connections) for _ in range(2)] == [b"hello"] * 2
    assert server.connections == made


async def test_a_body_without_a_length_ends_with_the_connection(
    server: Server, connections: Connections
) -> None:
    server.answer, server.closes = PLAIN.replace(b"content-length: 5\r\n", b""), True
    assert await ask(connections) == b"hello"


async def test_a_header_cannot_hold_a_line_break(server: Server, connections: Connections) -> None:
    with pytest.raises(ValueError, match="a line break"):
        async with connections.request("POST", "/x", b"", {"x": "y\r\nhost: other"}):
            pass
    assert server.connections == 0
