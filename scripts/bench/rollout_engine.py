"""Serve an engine that answers at once, over SGLang's HTTP API, for the benchmark of rollouts.

    python scripts/bench/rollout_engine.py MODEL TURNS TOGETHER

Turns 1 to TURNS - 1 of a trajectory call the tool ``look``, the last one answers. With TOGETHER n > 1 the
answers to n trajectories leave together, when n requests wait. Prints its port. A line on stdin makes it
print, as JSON, the seconds from each answer to the next request of the same trajectory.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import orjson

from agentrl.chat.model_folder import read_chat_files

WORDS = (
    "the", "of", "tower", "river", "year", "author", "page", "museum", "century", "because", "tool", "found",
    "number", "first", "city",
)  # fmt: skip
_NAME = re.compile(rb'"rid":"[^"-]*-([^"]*)"')
_SAID = "the page says that the tower by the river was built in that century and the author lived there"


def text_of(model: str, tokens: int) -> str:
    """Return text of about ``tokens`` tokens of a model's tokenizer, the same for the same number."""
    rng, tokenizer = random.Random(tokens), read_chat_files(model).tokenizer
    words = rng.choices(WORDS, k=2000)
    per_word = len(tokenizer.encode(" ".join(words), add_special_tokens=False).ids) / len(words)
    return " ".join(rng.choices(WORDS, k=int(tokens / per_word)))


class InstantEngine:
    """Knows every answer beforehand: one encoded body per turn."""

    def __init__(self, model: str, turns: int, together: int) -> None:
        files = read_chat_files(model)
        self._tokenizer = files.tokenizer
        self._turns = turns
        self._together = together
        self._eos = min(files.stop_ids)
        self._seen: Counter[str] = Counter()
        self._waiting: list[tuple[asyncio.StreamWriter, str, bytes]] = []
        self._answered_at: dict[str, float] = {}
        self.latencies: list[float] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        async for path, body in requests_of(reader, writer):
            if path == b"/generate":
                self._generate(writer, body)
            else:
                write_info(writer)

    def _generate(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        """Note when the request arrived; its ids are parsed when it is answered, in nobody's time."""
        found = _NAME.search(body)
        assert found is not None
        name = found[1].decode()
        if name in self._answered_at:
            self.latencies.append(time.perf_counter() - self._answered_at.pop(name))
        self._seen[name] += 1
        self._waiting.append((writer, name, body))
        if len(self._waiting) < self._together:
            return
        waiting, self._waiting = self._waiting, []
        answers = [self._answer(name, orjson.loads(body)) for _, name, body in waiting]
        now = time.perf_counter()
        for (each, waiter, _), (answer, is_stream) in zip(waiting, answers, strict=True):
            if self._seen[waiter] % self._turns:
                self._answered_at[waiter] = now
            _write(each, answer, stream=is_stream)

    def _answer(self, name: str, request: dict[str, Any]) -> tuple[bytes, bool]:
        turn = (self._seen[name] - 1) % self._turns + 1
        prompt_tokens = len(request["input_ids"])
        text = self._text(turn, name)
        ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._eos]
        meta = {
            "finish_reason": {"type": "stop", "matched": self._eos},
            "output_token_logprobs": [[-0.5 - token / 1e6, token, None] for token in ids],
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": prompt_tokens,
            "weight_version": "0",
        }
        answer = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
        return answer, bool(request.get("stream"))

    def _text(self, turn: int, name: str) -> str:
        if turn == self._turns:
            return f"<answer>{len(name) + sum(map(ord, name)) % 2}</answer>"
        call = {"name": "look", "arguments": {"query": f"{_SAID} {turn}"}}
        return f"I look at page {turn}. <tool_call>{json.dumps(call)}</tool_call>"


async def requests_of(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[tuple[bytes, bytes]]:
    """Yield path and body of each request of a connection; close it at its end."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lengths = [line[15:] for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"]
            yield head.split(b" ", 2)[1], await reader.readexactly(int(lengths[0]) if lengths else 0)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def write_info(writer: asyncio.StreamWriter) -> None:
    """Answer what a client asks before it generates."""
    info = {"weight_version": "0", "model_path": "", "vocab_size": 1_000_000}
    write_json(writer, info)


def write_json(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Answer a request with a JSON object."""
    _write(writer, orjson.dumps(body), stream=False)


def _write(writer: asyncio.StreamWriter, body: bytes, *, stream: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: "
    if not stream:
        writer.write(head + b"application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return
    event = b"data: " + body + b"\n\ndata: [DONE]\n\n"
    chunked = b"text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + chunked + b"%x\r\n" % len(event) + event + b"\r\n0\r\n\r\n")


async def main(model: str, turns: int, together: int) -> None:
    """Serve until stdin is closed."""
    engine = InstantEngine(model, turns, together)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(engine.latencies), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
