"""Relay requests to the benchmark's engine and its events back: what any gateway in Python costs at least.

    python scripts/bench/gateway_relay.py ENGINE_URL PORT

It decodes the request's JSON and sends the engine as many ids as the messages have words; it renders, checks
and stores nothing.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentrl.inference.http import Connections


class Relay:
    """Passes requests on."""

    def __init__(self, engine: str) -> None:
        self._engine = Connections(engine)

    async def chat(self, request: Request) -> Response:
        """Answer with the engine's events as they are."""
        body = orjson.loads(await request.body())
        words = sum(message["content"].count(" ") + 1 for message in body["messages"])
        return StreamingResponse(self._events(words), media_type="text/event-stream")

    async def health(self, request: Request) -> Response:
        """Answer when the relay is up."""
        return Response()

    async def _events(self, words: int) -> AsyncIterator[bytes]:
        body = orjson.dumps({"input_ids": [1] * words, "sampling_params": {}, "stream": True})
        async with self._engine.request(
            "POST", "/generate", body, {"content-type": "application/json"}
        ) as answer:
            async for piece in answer.pieces():
                yield piece


if __name__ == "__main__":
    relay = Relay(sys.argv[1])
    routes = [Route("/health", relay.health), Route("/", relay.chat, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), port=int(sys.argv[2]), log_level="warning", access_log=False)
