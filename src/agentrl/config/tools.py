"""Flags of tools: Python tools, MCP servers, an MCP manager, and the limits of calls."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.fields import Flags, flag


@dataclass(frozen=True, kw_only=True)
class ToolConfig(Flags):
    """The tools that a model may call, and their limits."""

    section = "tools"

    tools: str = flag(
        "", "Python tools, comma-separated: module:name of functions or classes, or registered names"
    )
    tool_config_path: str | None = flag(
        None, "verl's tool configuration, YAML: classes of tools with their settings and schemas"
    )
    mcp_manager_url: str | None = flag(None, "URL of an MCP manager (…/mcpapi) or a streamable-HTTP server")
    mcp_server_name: str = flag("all", "server to use behind --mcp_manager_url")
    mcp_servers_file: str | None = flag(
        None, "MCP servers by name (command or url): YAML, or the mcpServers JSON of other clients"
    )
    mcp_auth_token_env: str = flag("MCP_AUTH_TOKEN", "environment variable with the MCP bearer token")
    tool_timeout_seconds: float = flag(
        60.0,
        "timeout of one tool call; each progress message of the tool restarts it",
        within="(0, inf)",
        unit="seconds",
    )
    max_tool_result_chars: int = flag(
        32768,
        "a longer tool result is cut, with a notice to the model",
        within="[1, inf)",
        unit="characters",
    )
    max_parallel_tool_calls: int = flag(
        8, "tool calls of one turn that run at a time", within="[1, inf)", unit="calls"
    )
    max_tool_connections: int = flag(
        256,
        "calls in flight at one tool server, and connections of an HTTP pool; further calls wait",
        within="[1, inf)",
        unit="calls",
        per_process=True,
    )

    @property
    def any_named(self) -> bool:
        """Return whether a flag names tools."""
        return bool(self.tools or self.tool_config_path or self.mcp_manager_url or self.mcp_servers_file)
