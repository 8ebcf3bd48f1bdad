"""A server with the paths and the session by cookie of NeMo-Gym's: a counter that the row seeds."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from waiting import until

from agentrl.base.bounded_http import bind


class CounterServer:
    """Seed, add, verify. ``away`` makes it answer 503; ``verified`` has what ``/verify`` got."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.away: Counter[str] = Counter()
        """Path → how many of its next requests are answered by 503."""
        self.url = ""

    async def handle(self, request: Request) -> Response:
        path = request.url.path
        if path == "/openapi.json":
            return JSONResponse({"paths": {"/seed_session": {}, "/verify": {}, "/add": {}}})
        if self.away[path]:
            self.away[path] -= 1
            return Response("away", 503)
        session = request.cookies.get("counter", uuid.uuid4().hex)
        body = await request.json()
        answer: Any = {}
        if path == "/seed_session":
            self.counters[session] = body["initial_count"]
        elif path == "/add":
            if body["count"] < 0:
                return JSONResponse({"detail": "count: a valid integer is not below 0"}, 422)
            self.counters[session] += body["count"]
            answer = {"count": self.counters[session]}
        elif path == "/verify":
            self.verified.append(body)
            answer = {**body, "reward": float(self.counters[session] == body["expected_count"])}
        else:
            return Response("Not Found", 404)
        response = JSONResponse(answer)
        response.set_cookie("counter", session)
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[CounterServer]:
        """Serve in a thread until the end of the block."""
        import threading

        app = Starlette(routes=[Route("/{path:path}", self.handle, methods=["GET", "POST"])])
        listener = bind("127.0.0.1", 0, "the test")
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        await until(lambda: server.started)
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(10)
            listener.close()


def row(goal: int) -> dict[str, Any]:
    """Return a row of NeMo-Gym that begins at 3."""
    parameters = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    tool = {"type": "function", "name": "add", "description": "Add.", "parameters": parameters}
    messages = [
        {"role": "developer", "content": "Use the tool."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "1"}]},
        {"role": "user", "content": f"Add up to {goal}."},
    ]
    create = {"input": messages, "tools": [tool]}
    return {"responses_create_params": create, "expected_count": goal, "initial_count": 3}
