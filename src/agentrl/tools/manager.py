"""Use tool servers behind an MCP manager: plain HTTP at a URL that ends in ``/mcpapi``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from agentrl.errors import ToolServerError
from agentrl.tools.base import Reply, Schema, Trajectory, function_schema, schema_name, timeout_text
from agentrl.tools.redact import redact_address, redact_secrets
from agentrl.tools.specs import ManagerSpec

_CONTROL_SECONDS = 30.0
_EXCERPT = 300


class ManagerClient:
    """HTTP client of one manager. Its errors contain no token of its URL or its headers."""

    def __init__(self, spec: ManagerSpec) -> None:
        self._spec = spec
        self._http = httpx.AsyncClient(
            base_url=spec.url, headers=dict(spec.headers), timeout=_CONTROL_SECONDS
        )

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at ``path``."""
        try:
            response = await self._http.get(path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise self.error(
                f"answered {response.status_code} to {path}: {response.text[:_EXCERPT]}",
                hint="check --mcp_manager_url and the token in the variable that --mcp_auth_token_env names",
            )
        return self.json(response)

    async def post(self, path: str, body: dict[str, Any], timeout: float) -> httpx.Response:
        """Return the response to ``body``. Raises httpx.ReadTimeout after ``timeout`` seconds."""
        try:
            return await self._http.post(path, json=body, timeout=timeout)
        except httpx.ReadTimeout:
            raise
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def json(self, response: httpx.Response) -> dict[str, Any]:
        """Return the response's JSON object; any other value becomes its ``content``."""
        try:
            answer = response.json()
        except ValueError as error:
            raise self.error(f"answered no JSON: {response.text[:_EXCERPT]}") from error
        return answer if isinstance(answer, dict) else {"content": answer}

    def error(self, problem: str, hint: str | None = None) -> ToolServerError:
        """Return an error about this manager, without secrets."""
        message = f"MCP manager {redact_address(self._spec)} {redact_secrets(problem, self._spec)}"
        return ToolServerError(message, hint=hint)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.aclose()

    def _unreachable(self, error: httpx.HTTPError) -> ToolServerError:
        return self.error(
            f"cannot be reached: {type(error).__name__}: {error}",
            hint="start it, or correct --mcp_manager_url",
        )


class ManagedServer:
    """One server of a manager. All servers use the manager's HTTP client; it keeps no trajectory's state."""

    def __init__(self, name: str, manager: ManagerClient, *, call_timeout: float) -> None:
        """``call_timeout`` bounds one tool call, in seconds."""
        self.name = name
        self.schemas: list[Schema] = []
        self._manager = manager
        self._call_timeout = call_timeout

    async def open(self) -> None:
        """List the tools: ``GET /server/NAME/tools``."""
        answer = await self._manager.get(f"/server/{self.name}/tools")
        functions = [tool.get("function", tool) for tool in answer.get("tools", [])]
        self.schemas = sorted(
            (
                function_schema(item["name"], item.get("description"), item.get("parameters"))
                for item in functions
            ),
            key=schema_name,
        )

    def session(self, trajectory: Trajectory) -> ManagedSession:
        """Return a session that calls the server's tools."""
        return ManagedSession(self)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call ``POST /tool/NAME.TOOL``; an error in the response is the tool's."""
        try:
            response = await self._manager.post(
                f"/tool/{self.name}.{tool}", dict(arguments), self._call_timeout
            )
        except httpx.ReadTimeout:
            return Reply(text=timeout_text(tool, self._call_timeout), error=True)
        answer = self._manager.json(response)
        failed = response.status_code >= 400 or answer.get("status_code", 200) >= 400
        if response.status_code >= 500 and "detail" not in answer:
            raise self._manager.error(f"answered {response.status_code}")
        content = answer.get("content", answer.get("detail", ""))
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        return Reply(text=text, error=failed or answer.get("status") == "error")

    async def close(self) -> None:
        """Close the manager's HTTP client. Idempotent."""
        await self._manager.close()


class ManagedSession:
    """The calls of one trajectory to a managed server."""

    def __init__(self, server: ManagedServer) -> None:
        self._server = server

    async def open(self) -> None:
        """Do nothing: the manager keeps no state of a trajectory."""

    async def list(self) -> Sequence[Schema]:
        """Return the server's schemas, sorted by name."""
        return self._server.schemas

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call one tool."""
        return await self._server.call(tool, arguments)

    async def close(self) -> None:
        """Do nothing: the manager keeps no state of a trajectory."""


async def managed_servers(spec: ManagerSpec, *, call_timeout: float) -> list[ManagedServer]:
    """Return all servers of the manager, or the one that the flags select. Raises ToolServerError."""
    manager = ManagerClient(spec)
    try:
        answer = await manager.get("/servers")
        names = [str(name) for name in answer.get("servers", [])]
        if spec.server != "all" and spec.server not in names:
            raise manager.error(
                f"has no server {spec.server!r}", hint=f"--mcp_server_name is one of: all, {', '.join(names)}"
            )
    except BaseException:
        await manager.close()
        raise
    chosen = names if spec.server == "all" else [spec.server]
    return [ManagedServer(name, manager, call_timeout=call_timeout) for name in chosen]
