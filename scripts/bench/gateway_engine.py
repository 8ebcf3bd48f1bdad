"""Serve an engine that streams a fixed text over SGLang's HTTP API, for the benchmark of gateways.

    python scripts/bench/gateway_engine.py MODEL GAP_MS

Every answer has the same tokens: the first at once, each further one after GAP_MS. Prints its port.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import orjson
from rollout_engine import requests_of, write_info

from agentrl.chat.model_folder import read_chat_files

_TEXT = "the page says that the tower by the river was built in that century and the author lived there"


class StreamingEngine:
    """Knows its events beforehand."""

    def __init__(self, model: str, gap: float) -> None:
        files = read_chat_files(model)
        self._gap = gap
        ids = [*files.tokenizer.encode(_TEXT, add_special_tokens=False).ids[:32], min(files.stop_ids)]
        self._events = [_event(ids, place) for place in range(len(ids))]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        async for path, _ in requests_of(reader, writer):
            if path == b"/generate":
                await self._stream(writer)
            else:
                write_info(writer)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for place, event in enumerate(self._events):
            if place:
                await asyncio.sleep(self._gap)
            writer.write(b"%x\r\n" % len(event) + event + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")


def _event(ids: list[int], place: int) -> bytes:
    is_last = place == len(ids) - 1
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": ids[-1]} if is_last else None,
        "output_token_logprobs": [[-0.5, ids[place], None]],
        "prompt_tokens": 1, "completion_tokens": place + 1, "cached_tokens": 0, "weight_version": "0",
    }  # fmt: skip
    event = b"data: " + orjson.dumps({"output_ids": [ids[place]], "meta_info": meta}) + b"\n\n"
    return event + b"data: [DONE]\n\n" if is_last else event


async def main(model: str, gap_ms: float) -> None:
    """Serve until stdin is closed."""
    engine = StreamingEngine(model, gap_ms / 1000)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=2**24, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
