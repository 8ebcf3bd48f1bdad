"""Use tool servers behind an MCP manager: plain HTTP at a URL that ends in ``/mcpapi``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerConfigError
from agentrl.tools.base import Reply, Schema, Trajectory, function_schema, schema_name, timeout_text
from agentrl.tools.limits import CallGate
from agentrl.tools.manager_client import ManagerAnswer, ManagerClient
from agentrl.tools.mcp.content import image_items, images_in, is_content, json_text, render_content
from agentrl.tools.specs import Limits, ManagerSpec, Options


class ManagedServer:
    """One server of a manager. All servers use the manager's HTTP client."""

    def __init__(self, name: str, manager: ManagerClient, gate: CallGate, *, has_nodes: bool) -> None:
        """``gate`` bounds the calls. ``has_nodes``: the manager keeps the state of each trajectory."""
        self.name = name
        self.schemas: list[Schema] = []
        self._manager = manager
        self._gate = gate
        self._has_nodes = has_nodes

    async def open(self) -> None:
        """List the tools: ``GET /server/NAME/tools``. Raises ToolServerError."""
        answer = await self._manager.get(f"/server/{self.name}/tools", self.name)
        tools = answer.get("tools")
        entries = [item.get("function", item) for item in tools or () if isinstance(item, Mapping)]
        schemas = [
            function_schema(item["name"], item.get("description"), item.get("parameters"))
            for item in entries
            if isinstance(item, Mapping) and isinstance(item.get("name"), str)
        ]
        self.schemas = sorted(schemas, key=schema_name)

    def session(self, trajectory: Trajectory) -> ManagedSession:
        """Return a session that calls the server's tools."""
        return ManagedSession(self, trajectory)

    async def call(self, tool: str, arguments: Mapping[str, Any], trajectory: str) -> Reply:
        """Call ``POST /tool/NAME.TOOL``; an error in the answer is the tool's. Raises ToolServerError."""
        async with self._gate.enter(tool) as limits:
            seconds = limits.timeout_seconds or 0.0
            try:
                answer = await self._manager.call(self.name, tool, arguments, seconds, trajectory)
            except TimeoutError:
                return Reply(text=timeout_text(tool, seconds), error=True)
        content = _content(answer)
        encoded = [item["data"] for item in image_items(content)]
        images = await asyncio.to_thread(images_in, encoded) if encoded else ()
        return Reply(text=_text(content), error=_is_error(answer), images=images)

    async def end(self, trajectory: str) -> None:
        """End the state that the manager keeps of a trajectory."""
        if self._has_nodes:
            await self._manager.end(self.name, trajectory)

    async def close(self) -> None:
        """Close the manager's HTTP client. Idempotent."""
        await self._manager.close()


class ManagedSession:
    """The calls of one trajectory to a managed server."""

    def __init__(self, server: ManagedServer, trajectory: Trajectory) -> None:
        self._server = server
        self._trajectory = trajectory.id
        self._has_called = False

    async def open(self) -> None:
        """Do nothing: the manager begins a trajectory's state with its first call."""

    async def list(self) -> Sequence[Schema]:
        """Return the server's schemas, sorted by name."""
        return self._server.schemas

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call one tool. Raises ToolServerError."""
        self._has_called = True
        return await self._server.call(tool, arguments, self._trajectory)

    async def close(self) -> None:
        """End the trajectory's state, if there is one. Idempotent."""
        has_called, self._has_called = self._has_called, False
        if has_called:
            await self._server.end(self._trajectory)


async def managed_servers(spec: ManagerSpec, config: ToolConfig) -> list[ManagedServer]:
    """Return all servers of the manager, or the one that the flags select. Raises ToolServerError."""
    manager = ManagerClient(spec, connections=config.max_tool_connections)
    try:
        answer = await manager.get("/servers", spec.server)
        listed = answer.get("servers")
        if not isinstance(listed, list):
            problem = f"answered no list of servers to /servers: {str(answer)[:200]}"
            raise manager.error(problem, server=spec.server)
        names = [str(name) for name in listed]
        if spec.server != "all" and spec.server not in names:
            raise manager.error(
                f"has no server {spec.server!r}",
                hint=f"--mcp_server_name is one of: all, {', '.join(names)}",
                kind=ToolServerConfigError,
            )
    except BaseException:
        await manager.close()
        raise
    base = Limits(timeout_seconds=config.tool_timeout_seconds)
    return [
        ManagedServer(
            name,
            manager,
            CallGate(Options(), base, connections=config.max_tool_connections),
            has_nodes=answer.get("nodes") is True,
        )
        for name in (names if spec.server == "all" else [spec.server])
    ]


def _content(answer: ManagerAnswer) -> Any:
    """Return the answer's content, or its ``detail``; one content item as a list."""
    content = answer.body
    if isinstance(content, Mapping) and {"content", "detail"} & set(content):
        content = content.get("content", content.get("detail"))
    return [content] if is_content(content) else content


def _text(content: Any) -> str:
    """Return content as text: item by item if one of them is a content item, else as JSON."""
    if isinstance(content, list) and any(map(is_content, content)):
        parts = [item if isinstance(item, str) or is_content(item) else json_text(item) for item in content]
        return render_content(parts)
    return content if isinstance(content, str) else json_text(content)


def _is_error(answer: ManagerAnswer) -> bool:
    code = answer.body.get("status_code") if isinstance(answer.body, Mapping) else None
    status = answer.body.get("status") if isinstance(answer.body, Mapping) else None
    return answer.status >= 400 or (isinstance(code, int) and code >= 400) or status == "error"
