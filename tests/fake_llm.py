"""Serve chat completions over real HTTP, by script: right answers, and every way to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Request = dict[str, Any]
Reply = str | int | bytes | Callable[[Request], str | bytes]

HANG = "\0hang"
CLOSE = "\0close"
HALF = "\0half"
HTML = "\0html"
LOGIN = "\0login"
NO_JSON = "\0no json"
NO_CHOICES = "\0no choices"
ENDLESS = "\0endless"

_PAGE = b"<!DOCTYPE html><html><body><form>Log in</form></body></html>"


@dataclass
class FakeLLM:
    """A server on loopback. ``replies`` scripts each model; the last reply repeats.

    A reply is a text, an HTTP status, a body, a function of the request, or one of the constants above.
    ``asked`` holds the requests in order.
    """

    url: str = ""
    path: str | None = None
    """The only path that is served; None: all."""
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    retry_after: str | None = None
    error: str = "no"
    """The message of an HTTP error."""
    asked: list[Request] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    connections: int = 0
    under_way: int = 0
    most_under_way: int = 0
    seconds: float = 0.0
    """How long a reply takes."""
    has_usage: bool = True
    tool_calls: list[list[dict[str, Any]]] = field(default_factory=list)
    """The tool calls of the next replies."""
    folder: Path | None = None
    """Where ``write_config`` writes."""

    def write_config(self, section: str, *models: str, api_key: str = "k", **settings: Any) -> str:
        """Write a section of an agent configuration that asks ``models`` here; return the file's path."""
        entries = [{"model": model, "base_url": self.url, "api_key": api_key} for model in models]
        patience = {"retry_delay": 0.01, "timeout": 60}
        assert self.folder is not None
        path = self.folder / "agent_config.yml"
        path.write_text(yaml.safe_dump({section: {"models": entries, **patience, **settings}}))
        return str(path)

    @property
    def models(self) -> list[str]:
        """Return the model of each request."""
        return [request["model"] for request in self.asked]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if head[0].startswith("GET /login"):
            return await self._send(writer, 200, _PAGE, "text/html")
        if self.path is not None and not head[0].startswith(f"POST {self.path} "):
            return await self._send(writer, 404, b'{"detail": "Not Found"}')
        request = json.loads(body)
        self.asked.append(request)
        self.keys.append(headers.get("authorization", ""))
        queue = self.replies[request.get("model", "")]
        reply = queue.pop(0) if len(queue) > 1 else queue[0]
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.seconds)
            return await self._reply(writer, reply(request) if callable(reply) else reply)
        finally:
            self.under_way -= 1

    async def _reply(self, writer: asyncio.StreamWriter, reply: str | int | bytes) -> bool:
        if isinstance(reply, bytes):
            return await self._send(writer, 200, reply)
        if isinstance(reply, int):
            return await self._send(writer, reply, json.dumps({"error": {"message": self.error}}).encode())
        if reply == HANG:
            await asyncio.sleep(3600)
        if reply in (CLOSE, HALF):
            if reply == HALF:
                writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"choices": [')
                await writer.drain()
            return False
        if reply == ENDLESS:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" " * 65536)
                await writer.drain()
            return False
        if reply == LOGIN:
            return await self._send(writer, 302, b"", location=f"{self.url}/../login")
        if reply == HTML:
            return await self._send(writer, 200, _PAGE, "text/html")
        if reply == NO_JSON:
            return await self._send(writer, 200, b'{"choices": [{"mess')
        if reply == NO_CHOICES:
            return await self._send(writer, 200, b'{"error": "overloaded"}')
        calls = self.tool_calls.pop(0) if self.tool_calls else []
        body = completion(reply, tool_calls=calls)
        return await self._send(writer, 200, body if self.has_usage else body.replace(b'"usage"', b'"used"'))

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json",
        location: str | None = None,
    ) -> bool:  # fmt: skip
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
        if self.retry_after is not None and status >= 400:
            lines.append(f"Retry-After: {self.retry_after}")
        if location is not None:
            lines.append(f"Location: {location}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        return True


def completion(
    text: str, prompt_tokens: int = 100, completion_tokens: int = 10, tool_calls: Any = ()
) -> bytes:
    """Return the body of a chat completion."""
    message = {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {
        "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }  # fmt: skip
    answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return json.dumps({**answer, "usage": usage}).encode()


@contextlib.asynccontextmanager
async def fake_llm(folder: Path | None = None) -> AsyncIterator[FakeLLM]:
    """Run a server until the block ends; its configurations are written into ``folder``."""
    fake = FakeLLM(folder=folder)
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await fake.serve(reader, writer)
        except asyncio.CancelledError:
            writer.close()
        finally:
            connections.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield fake
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*connections, return_exceptions=True), 10)
