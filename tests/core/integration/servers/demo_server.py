"""An MCP server for tests: ``demo_server.py stdio|PORT [NAME|sse]``; ``sse``: over the older HTTP+SSE."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, MCPServer
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


@server.tool()
async def grow(context: Context) -> str:
    """Add a tool and announce it."""
    server.add_tool(only_on_the_second, name="grown")
    await context.notify_tools_changed()
    return "grew"


def only_on_the_second(q: str) -> str:
    """Look up."""
    return f"about {q}"


if __name__ == "__main__":
    if sys.argv[2:] == ["sse"]:
        server.run("sse", port=int(sys.argv[1]))
    if len(sys.argv) > 2:
        server.add_tool(only_on_the_second, name=sys.argv[2])
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
