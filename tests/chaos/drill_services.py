"""Serve the outage drills: python -m chaos.drill_services engine|judge|manager PORT [MODEL [held]].

The engine calls the tool ``convert`` first and answers after its result, over SGLang's HTTP API; if it is
``held``, it generates nothing before a POST /mode. GET /generated returns how many tokens it has generated.
The judge answers over OpenAI's API, and the manager of tools over its own. POST /mode with ``limited`` or
``html`` makes both refuse everybody with 429, or answer 200 with a page of HTML.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from agentrl.chat.model_folder import read_chat_files

HOST = "127.0.0.1"
_THINK_SECONDS = 0.4
_CALL = {"name": "convert", "arguments": {"value": 1, "from_unit": "km", "to_unit": "m"}}

Answer = Callable[[str, bytes], "tuple[int, str, bytes, float]"]
"""(path, body) → status, content type, body, seconds to wait."""


class DrillEngine:
    """Calls the tool in the first turn of a conversation, and answers with a random number in the second."""

    def __init__(self, model: str) -> None:
        files = read_chat_files(model)
        self._tokenizer = files.tokenizer
        self._eos = min(files.stop_ids)
        self._generated = 0

    def answer(self, path: str, body: bytes) -> tuple[int, str, bytes, float]:
        """Answer one request."""
        if path == "/generated":
            return 200, "application/json", json.dumps(self._generated).encode(), 0.0
        if path != "/generate":
            info = {"weight_version": "0", "model_path": "", "vocab_size": 1_000_000}
            return 200, "application/json", json.dumps(info).encode(), 0.0
        request = json.loads(body)
        prompt = self._tokenizer.decode(request["input_ids"], skip_special_tokens=True)
        ids = [*self._tokenizer.encode(self.say(prompt), add_special_tokens=False).ids, self._eos]
        self._generated += len(ids)
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop", "matched": self._eos},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "prompt_tokens": len(request["input_ids"]), "completion_tokens": len(ids), "cached_tokens": 0,
            "weight_version": "0",
        }  # fmt: skip
        event = json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()
        if not request.get("stream"):
            return 200, "application/json", event, _THINK_SECONDS
        return 200, "text/event-stream", b"data: " + event + b"\n\ndata: [DONE]\n\n", _THINK_SECONDS

    def say(self, prompt: str) -> str:
        """Return the message of the model."""
        if "1000" in prompt:
            return f"<answer>{random.random()}</answer>"
        return f"<tool_call>\n{json.dumps(_CALL)}\n</tool_call>"


class _Refusing(ABC):
    """Answers, or refuses everybody."""

    def __init__(self) -> None:
        self._mode = "up"

    def answer(self, path: str, body: bytes) -> tuple[int, str, bytes, float]:
        """Answer one request."""
        if path == "/mode":
            self._mode = body.decode()
            return 200, "text/plain", b"ok", 0.0
        if self._mode == "limited":
            return 429, "application/json", b'{"error": {"message": "rate limit reached"}}', 0.0
        if self._mode == "html":
            return 200, "text/html", b"<html><body>Sign in to continue</body></html>", 0.0
        return 200, "application/json", json.dumps(self.reply(path)).encode(), 0.05

    @abstractmethod
    def reply(self, path: str) -> dict[str, Any]:
        """Return the JSON of an answer."""


class DrillJudge(_Refusing):
    """Says Correct to about half of the questions."""

    def reply(self, path: str) -> dict[str, Any]:
        """Return a verdict."""
        verdict = {"role": "assistant", "content": random.choice(["Correct", "Incorrect"])}
        choice = {"index": 0, "message": verdict, "finish_reason": "stop"}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice],
                "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}}  # fmt: skip


class DrillManager(_Refusing):
    """An MCP manager with one server, ``units``, and its tool ``convert``."""

    def reply(self, path: str) -> dict[str, Any]:
        """Return the servers, the tools, or the result of a call."""
        if path.endswith("/servers"):
            return {"servers": ["units"]}
        if path.endswith("/tools"):
            types = {"value": "number", "from_unit": "string", "to_unit": "string"}
            properties = {name: {"type": kind} for name, kind in types.items()}
            parameters = {"type": "object", "properties": properties}
            function = {"name": _CALL["name"], "description": "Converts.", "parameters": parameters}
            return {"tools": [{"type": "function", "function": function}]}
        return {"status": "success", "content": "1000"}


async def serve(port: int, answer: Answer, *, is_held: bool = False) -> None:
    """Serve HTTP until the process ends; one that ``is_held`` generates nothing before a POST /mode."""
    is_open = asyncio.Event()
    if not is_held:
        is_open.set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.split(b"\r\n")
                lengths = [line[15:] for line in lines if line[:15].lower() == b"content-length:"]
                body = await reader.readexactly(int(lengths[0]) if lengths else 0)
                path = lines[0].split(b" ")[1].decode()
                if path == "/mode":
                    is_open.set()
                elif path == "/generate":
                    await is_open.wait()
                status, kind, content, seconds = answer(path, body)
                await asyncio.sleep(seconds)
                writer.write(
                    b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
                    % (status, kind.encode(), len(content))
                    + content
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, HOST, port, limit=2**24)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    role, given_port = sys.argv[1], int(sys.argv[2])
    handlers = {"judge": DrillJudge, "manager": DrillManager}
    handler = DrillEngine(sys.argv[3]).answer if role == "engine" else handlers[role]().answer
    asyncio.run(serve(given_port, handler, is_held="held" in sys.argv[4:]))
