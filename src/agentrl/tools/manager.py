"""Servers behind an MCP manager: plain HTTP under a URL that ends in ``/mcpapi``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from agentrl.errors import ToolServerError
from agentrl.tools.base import Schema, function_schema, schema_name, timeout_text
from agentrl.tools.config import ManagerSpec

_CONTROL_SECONDS = 30.0
_EXCERPT = 300


class ManagedServer:
    """One server of a manager. Requests share the manager's HTTP client."""

    def __init__(self, name: str, http: httpx.AsyncClient, *, call_timeout: float) -> None:
        """``http`` has the manager's URL as its base."""
        self.name = name
        self._http = http
        self._call_timeout = call_timeout
        self._schemas: list[Schema] | None = None

    async def open(self) -> None:
        """List the tools once."""
        await self.schemas()

    async def schemas(self) -> list[Schema]:
        """``GET /server/NAME/tools``, remembered."""
        if self._schemas is None:
            answer = await _get(self._http, f"/server/{self.name}/tools")
            functions = [tool.get("function", tool) for tool in answer.get("tools", [])]
            self._schemas = sorted(
                (
                    function_schema(item["name"], item.get("description"), item.get("parameters"))
                    for item in functions
                ),
                key=schema_name,
            )
        return self._schemas

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """``POST /tool/NAME.TOOL``; an error that it reports is the tool's."""
        try:
            response = await self._http.post(
                f"/tool/{self.name}.{tool}", json=dict(arguments), timeout=self._call_timeout
            )
        except httpx.ReadTimeout:
            return timeout_text(tool, self._call_timeout), True
        except httpx.HTTPError as error:
            raise _unreachable(self._http, error) from error
        answer = _object(self._http, response)
        failed = response.status_code >= 400 or answer.get("status_code", 200) >= 400
        if response.status_code >= 500 and "detail" not in answer:
            raise ToolServerError(f"MCP manager {self._http.base_url} answered {response.status_code}")
        content = answer.get("content", answer.get("detail", ""))
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        return text, failed or answer.get("status") == "error"

    async def close(self) -> None:
        """Close the manager's HTTP client; closing it again does nothing."""
        await self._http.aclose()


async def managed_servers(spec: ManagerSpec, *, call_timeout: float) -> list[ManagedServer]:
    """The servers that the manager offers, or the one that the flags pick; ToolServerError if it is away."""
    http = httpx.AsyncClient(base_url=spec.url, headers=dict(spec.headers), timeout=_CONTROL_SECONDS)
    try:
        answer = await _get(http, "/servers")
        names = [str(name) for name in answer.get("servers", [])]
        if spec.server != "all" and spec.server not in names:
            raise ToolServerError(
                f"MCP manager {spec.url} has no server {spec.server!r}",
                cure=f"--mcp_server_name is one of: all, {', '.join(names)}",
            )
    except BaseException:
        await http.aclose()
        raise
    chosen = names if spec.server == "all" else [spec.server]
    return [ManagedServer(name, http, call_timeout=call_timeout) for name in chosen]


async def _get(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    try:
        response = await http.get(path)
    except httpx.HTTPError as error:
        raise _unreachable(http, error) from error
    if response.status_code != 200:
        raise ToolServerError(
            f"MCP manager {http.base_url} answered {response.status_code} to {path}:"
            f" {response.text[:_EXCERPT]}",
            cure="see --mcp_manager_url and the token in the variable that --mcp_auth_token_env names",
        )
    return _object(http, response)


def _object(http: httpx.AsyncClient, response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError as error:
        raise ToolServerError(
            f"MCP manager {http.base_url} answered no JSON: {response.text[:_EXCERPT]}"
        ) from error
    return answer if isinstance(answer, dict) else {"content": answer}


def _unreachable(http: httpx.AsyncClient, error: httpx.HTTPError) -> ToolServerError:
    return ToolServerError(
        f"MCP manager {http.base_url} cannot be reached: {type(error).__name__}: {error}",
        cure="start it, or mend --mcp_manager_url",
    )
