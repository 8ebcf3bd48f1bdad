"""Name tools uniquely over all servers: a tool of several servers is offered as ``server.tool``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from agentrl.tools.base import Schema, function_schema, schema_name


class ToolNames:
    """The names under which the tools of several servers are offered."""

    def __init__(self, tools: Mapping[str, Iterable[Schema]]) -> None:
        """``tools`` holds each server's schemas, by the server's name."""
        own = {(server, schema_name(schema)) for server, schemas in tools.items() for schema in schemas}
        servers_with = Counter(tool for _, tool in own)
        self._shared = {tool for tool, count in servers_with.items() if count > 1}

    def offered(self, server: str, tool: str) -> str:
        """Return the name that the model sees."""
        return f"{server}.{tool}" if tool in self._shared else tool

    def renamed(self, server: str, schema: Schema) -> Schema:
        """Return ``schema`` under the name that the model sees."""
        function = schema["function"]
        name = self.offered(server, function["name"])
        return function_schema(name, function["description"], function["parameters"])
