"""Serve the calculator as an MCP server over stdio: ``python -m agentrl.quickstart.servers.calculator``."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from agentrl.quickstart.servers.arithmetic import ArithmeticTextError, evaluate

server = MCPServer("calculator", log_level="WARNING")


@server.tool(structured_output=False)
def calculate(expression: str) -> str:
    """Evaluates arithmetic."""
    try:
        return evaluate(expression)
    except ArithmeticTextError as error:
        raise ToolError(str(error)) from error


if __name__ == "__main__":
    server.run("stdio")
