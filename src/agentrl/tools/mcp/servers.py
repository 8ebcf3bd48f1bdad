"""Make the client of an MCP server: shared, or each trajectory's own."""

from __future__ import annotations

from agentrl.config.schema import ToolConfig
from agentrl.tools.mcp.connector import Connector
from agentrl.tools.mcp.dedicated import DedicatedServer
from agentrl.tools.mcp.shared import SharedServer
from agentrl.tools.specs import CallGate, Limits, McpSpec, Scope, StdioSpec

_PARALLEL_STARTS = 4
"""Processes of one server that start at a time."""


def mcp_server(spec: McpSpec, config: ToolConfig) -> SharedServer | DedicatedServer:
    """Return the client of one server, according to its scope."""
    base = Limits(timeout_seconds=config.tool_timeout_seconds, max_result_chars=config.max_tool_result_chars)
    gate = CallGate(spec.options, base, connections=config.max_tool_connections)
    is_dedicated = spec.options.scope is Scope.TRAJECTORY
    own = (limits.over(base) for limits in (spec.options.limits, *spec.options.tools.values()))
    longest = max(max(limits.timeout_seconds or 0.0, limits.max_seconds or 0.0) for limits in (base, *own))
    connector = Connector(
        spec,
        connections=config.max_tool_connections,
        read_seconds=longest + 10.0,
        parallel=_PARALLEL_STARTS if isinstance(spec, StdioSpec) else config.max_tool_connections,
    )
    return DedicatedServer(connector, gate) if is_dedicated else SharedServer(connector, gate)
