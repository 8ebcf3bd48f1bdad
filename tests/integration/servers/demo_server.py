"""An MCP server for tests: ``demo_server.py stdio|PORT [NAME]``."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("demo", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@server.tool()
def refuse(reason: str) -> str:
    """Answer with an error."""
    raise ToolError(reason)


@server.tool()
async def wait(seconds: float) -> str:
    """Answer after a while."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def pid() -> int:
    """The server's process id."""
    return os.getpid()


@server.tool()
def long_text(length: int) -> str:
    """So many letters."""
    return "x" * length


@server.tool()
def die() -> str:
    """Kill the server."""
    os._exit(3)


def only_on_the_second(q: str) -> str:
    """Look up."""
    return f"about {q}"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        server.add_tool(only_on_the_second, name=sys.argv[2])
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
