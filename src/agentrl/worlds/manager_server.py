"""Serve tool servers behind one HTTP interface, the manager's: each trajectory has nodes of its own.

A node is the session of one trajectory with one server. It begins with the first call, and ends when the
client ends it or after a time without a call. ``tools/manager.py`` is the client.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from agentrl.base.concurrency import background
from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerConfigError, ToolServerError
from agentrl.tools.config import McpSpec
from agentrl.tools.manager import TRAJECTORY_HEADER
from agentrl.tools.mcp.content import MAX_MESSAGE_BYTES, render_item
from agentrl.tools.mcp.server import McpServer, mcp_server
from agentrl.tools.tool import Schema, ToolNames, ToolResult, ToolSession, TrajectoryInfo, schema_name

logger = logging.getLogger(__name__)

_ANONYMOUS: Final = "anonymous"
"""The trajectory of clients that name none: they share its nodes."""
_RETRY_SECONDS: Final = 5
_LOOKS_PER_IDLE: Final = 4


@dataclass
class _Node:
    """A session, from its first call on; ``ready`` is set once it can be called."""

    session: ToolSession
    opening: asyncio.Task[ToolSession]
    running: int = 0
    used_at: float = field(default_factory=time.monotonic)


class Nodes:
    """The nodes of all trajectories."""

    def __init__(
        self, specs: Sequence[McpSpec], config: ToolConfig, *, idle_seconds: float, most: int
    ) -> None:
        """``most`` nodes may live at a time; one without a call for ``idle_seconds`` is ended."""
        self.servers: dict[str, McpServer] = {spec.name: mcp_server(spec, config) for spec in specs}
        self._config = config
        self._idle_seconds = idle_seconds
        self._most = most
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._down: set[str] = set()

    async def open(self) -> None:
        """Connect to every server. Raises ToolServerConfigError for one that cannot be used; one that is
        down is logged, and tried again when it is needed."""
        for server in self.servers.values():
            try:
                await server.open()
            except ToolServerConfigError:
                await self.close()
                raise
            except ToolServerError as error:
                self._down.add(server.name)
                logger.warning("tool server is down", extra={"server": server.name, "why": error.message})

    async def schemas(self, name: str) -> Sequence[Schema]:
        """Return the tools of a server. Raises ToolServerError if it is down."""
        if name in self._down:
            await self.servers[name].open()
            self._down.discard(name)
        return self.servers[name].schemas

    async def call(self, name: str, tool: str, arguments: Mapping[str, Any], trajectory: str) -> ToolResult:
        """Call a tool of the trajectory's node. Raises ToolServerError."""
        await self.schemas(name)
        node = self._node(name, trajectory)
        node.running += 1
        try:
            session = await asyncio.shield(node.opening)
            return await session.call(tool, arguments)
        except ToolServerError:
            if node.opening.done() and node.opening.exception() is not None:
                self._nodes.pop((name, trajectory), None)
            raise
        finally:
            node.running -= 1
            node.used_at = time.monotonic()

    async def end(self, name: str, trajectory: str) -> None:
        """End a trajectory's node. Idempotent."""
        node = self._nodes.pop((name, trajectory), None)
        if node is not None:
            await asyncio.gather(node.opening, return_exceptions=True)
            await node.session.close()

    async def watch(self) -> None:
        """End idle nodes, until cancelled."""
        while True:
            await asyncio.sleep(self._idle_seconds / _LOOKS_PER_IDLE)
            limit = time.monotonic() - self._idle_seconds
            idle = [key for key, node in self._nodes.items() if not node.running and node.used_at < limit]
            for name, trajectory in idle:
                logger.info("node is idle", extra={"server": name, "trajectory": trajectory})
            for error in await asyncio.gather(*(self.end(*key) for key in idle), return_exceptions=True):
                if error is not None:
                    logger.warning("an idle node did not end cleanly", exc_info=error)

    async def close(self) -> None:
        """End every node and every server. Idempotent."""
        await asyncio.gather(*(self.end(*key) for key in list(self._nodes)))
        await asyncio.gather(*(server.close() for server in self.servers.values()))

    def _node(self, name: str, trajectory: str) -> _Node:
        """Return the trajectory's node; begin one if it has none. Raises ToolServerError."""
        node = self._nodes.get((name, trajectory))
        if node is None:
            if len(self._nodes) >= self._most:
                raise ToolServerError("all nodes are in use: raise --max_nodes, or wait")
            server, config = self.servers[name], self._config
            session = ToolSession(
                {name: server.session(TrajectoryInfo(id=trajectory))},
                ToolNames({name: server.schemas}),
                max_chars=config.max_tool_result_chars,
                max_parallel=config.max_parallel_tool_calls,
            )
            node = _Node(session, asyncio.create_task(session.__aenter__()))
            self._nodes[name, trajectory] = node
        return node


def manager_app(nodes: Nodes, token: str | None) -> Starlette:
    """Return the manager's routes below ``/mcpapi``, and ``/health``. ``token`` is the bearer's, if any."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            async with background(nodes.watch()):
                yield
        finally:
            await nodes.close()

    routes = _Routes(nodes, token)
    api = [
        Route("/servers", routes.guarded(routes.servers)),
        Route("/tools", routes.guarded(routes.tools)),
        Route("/server/{name}/tools", routes.guarded(routes.tools)),
        Route("/server/{name}/node", routes.guarded(routes.end), methods=["DELETE"]),
        Route("/tool/{tool}", routes.guarded(routes.call), methods=["POST"]),
    ]
    health = Route("/health", lambda _: JSONResponse({"status": "ok"}))
    return Starlette(
        routes=[health, Mount("/mcpapi", routes=api)],
        exception_handlers={HTTPException: _refused, ToolServerError: _down},
        lifespan=lifespan,
    )


class _Routes:
    """The answers to requests."""

    def __init__(self, nodes: Nodes, token: str | None) -> None:
        self._nodes = nodes
        self._expected = None if token is None else f"Bearer {token}".encode()

    def guarded(self, answer: Any) -> Any:
        """Return an endpoint that checks the token."""

        async def endpoint(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if self._expected is not None and not hmac.compare_digest(given, self._expected):
                raise HTTPException(401, "give the token of MCP_AUTH_TOKEN as Authorization: Bearer")
            return JSONResponse(await answer(request))

        return endpoint

    async def servers(self, _: Request) -> dict[str, Any]:
        return {"servers": list(self._nodes.servers), "nodes": True}

    async def tools(self, request: Request) -> dict[str, Any]:
        name = request.path_params.get("name")
        names = list(self._nodes.servers) if name is None else [self._known(name)]
        # Say what each keeps: a client that goes on with a trajectory has no other way to know.
        return {
            "tools": [
                {**schema, "state": self._nodes.servers[each].state_of(schema_name(schema)).value}
                for each in names
                for schema in await self._nodes.schemas(each)
            ]
        }

    async def end(self, request: Request) -> dict[str, Any]:
        await self._nodes.end(self._known(request.path_params["name"]), _trajectory(request))
        return {"status": "success"}

    async def call(self, request: Request) -> dict[str, Any]:
        name, tool = await self._target(request.path_params["tool"])
        result = await self._nodes.call(name, tool, await _arguments(request), _trajectory(request))
        return {"status": "error" if result.error else "success", "content": _content(result)}

    def _known(self, name: str) -> str:
        if name not in self._nodes.servers:
            raise HTTPException(404, f"there is no server {name}: {', '.join(self._nodes.servers)}")
        return name

    async def _target(self, path: str) -> tuple[str, str]:
        """Return the server and the tool that ``NAME.TOOL`` or ``TOOL`` names."""
        server, _, tool = path.partition(".")
        if tool and server in self._nodes.servers:
            return server, tool
        owners = [
            name
            for name in self._nodes.servers
            if any(schema_name(schema) == path for schema in await self._nodes.schemas(name))
        ]
        if len(owners) != 1:
            problem = f"tools of {', '.join(owners)}: name the server" if owners else "no tool of any server"
            raise HTTPException(404, f"{path}: {problem}")
        return owners[0], path


async def _arguments(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_MESSAGE_BYTES:
            raise HTTPException(413, f"the arguments are longer than {MAX_MESSAGE_BYTES // 2**20} MiB")
    try:
        value = json.loads(bytes(body) or b"{}")
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"the arguments are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HTTPException(422, "give the arguments as a JSON object")
    return value


def _content(result: ToolResult) -> str | list[dict[str, Any]]:
    """Return the text, or, with images, the items; the client describes the images again."""
    if not result.images:
        return result.text
    images = [
        {"type": "image", "data": base64.b64encode(image.data).decode(), "mimeType": image.media_type}
        for image in result.images
    ]
    described = [render_item(image) for image in images]
    text = "\n".join(line for line in result.text.split("\n") if line not in described)
    return [*([{"type": "text", "text": text}] if text else []), *images]


def _trajectory(request: Request) -> str:
    return request.headers.get(TRAJECTORY_HEADER, _ANONYMOUS)


def _refused(_: Request, error: Exception) -> JSONResponse:
    """Answer a refused request as JSON."""
    status, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "")
    return JSONResponse({"status_code": status, "detail": detail}, status)


def _down(_: Request, error: Exception) -> JSONResponse:
    """Answer a call of a server that is down as JSON: it may be repeated."""
    detail = error.message if isinstance(error, ToolServerError) else ""
    return JSONResponse({"status_code": 503, "detail": detail}, 503, {"Retry-After": str(_RETRY_SECONDS)})
