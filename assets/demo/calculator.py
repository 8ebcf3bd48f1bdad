"""Serve the calculator as an MCP server over stdio: ``demo/calculator.py``."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from demo.arithmetic import ArithmeticTextError, evaluate

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
