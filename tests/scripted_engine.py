"""A real HTTP server that answers generations by a script, and so misbehaves as an engine may."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tcp_server import TcpServer

from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus

VOCAB = 100
Answer = Callable[["Call"], Awaitable[None]]


class Call:
    """One request to ``/generate``, and the connection to answer it on."""

    def __init__(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.body = body
        self.ids: list[int] = body.get("input_ids") or body["token_ids"]
        limits = body["sampling_params"]
        self.max_new_tokens: int = limits.get("max_new_tokens") or limits["max_tokens"]
        self.is_whole = False
        """Answer with one JSON object instead of a stream."""
        self._writer = writer

    async def head(self, kind: str = "text/event-stream", status: str = "200 OK") -> None:
        kind = "application/json" if self.is_whole else kind
        head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n"
        await self.write(head.encode())

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def event(self, event: Any) -> None:
        content = json.dumps(event).encode()
        await self.write(content if self.is_whole else b"data: " + content + b"\n\n")

    async def tokens(
        self, ids: Sequence[int], total: int, reason: str | None = None, *, version: str = "0", **meta: Any
    ) -> None:
        """Send the event that adds ``ids`` to make ``total`` tokens; logprob −id / 10 unless given."""
        known = {
            "finish_reason": {"type": reason} if reason else None,
            "prompt_tokens": len(self.ids),
            "completion_tokens": total,
            "cached_tokens": 0,
            "weight_version": version,
            "output_token_logprobs": [[-token / 10, token, None] for token in ids],
        }
        await self.event({"output_ids": list(ids), "meta_info": {**known, **meta}})

    async def done(self) -> None:
        await self.write(b"data: [DONE]\n\n")


class ScriptedEngine(TcpServer):
    """Answers each generation with the next of ``answers``, and every later one with the last."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__()
        self.answers = list(answers)
        self.calls: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.vocab_size = VOCAB

    def service(self, name: str, **fields: Any) -> InferenceService:
        values = {"status": ServiceStatus.READY, "policy_version": 0, **fields}
        return InferenceService(
            id=name, url=self.url, engine="sglang", model="scripted", host="h", pid=1, **values
        )

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines if line)
            body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
            await self._answer(first.split()[1], body, headers, writer)

    async def _answer(
        self, path: str, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> None:
        if path in ("/generate", "/inference/v1/generate"):
            self.calls.append(body)
            self.headers.append(headers)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            await answer(Call(body, writer))
            return
        if path == "/abort_request":
            self.aborted.append(body.get("rid", "*"))
        known = {
            "/model_info": {"model_path": "scripted", "weight_version": "0", "vocab_size": self.vocab_size},
            "/server_info": {"context_length": 4096},
            "/weight_info": {"weight_version": "0"},
        }
        content = json.dumps(known.get(path, {})).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + content)
        await writer.drain()
