"""``agentrl tools manager``: serve tool servers to samplers, with nodes of its own for each trajectory."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os

from agentrl.config.load import CommandParser
from agentrl.config.tools import ToolConfig

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(argv: list[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    arguments = _parser().parse_args(argv)
    from agentrl.observe.logging import LineFormatter

    console = logging.StreamHandler()
    console.setFormatter(LineFormatter("manager", date_format="%H:%M:%S"))
    logging.getLogger().addHandler(console)
    logging.getLogger("agentrl").setLevel(logging.INFO)
    asyncio.run(_serve(arguments))
    return 0


def _parser() -> CommandParser:
    tools = ToolConfig()
    parser = CommandParser(prog="agentrl tools", description="Tool servers of many samplers.")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=CommandParser)
    manager = actions.add_parser("manager", help="serve the servers of a file at http://HOST:PORT/mcpapi")
    manager.add_argument("--mcp_servers_file", required=True, help="MCP servers by name (docs/tools.md)")
    manager.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    manager.add_argument("--port", type=int, default=8000, help="port; 0: any free one (%(default)s)")
    manager.add_argument(
        "--max_nodes", type=_positive, default=256, help="nodes that live at a time (%(default)s)"
    )
    manager.add_argument(
        "--idle_seconds",
        type=_positive,
        default=900,
        help="a node without a call for so long is ended (%(default)s)",
    )
    manager.add_argument(
        "--tool_timeout_seconds",
        type=_positive,
        default=int(tools.tool_timeout_seconds),
        help="timeout of one tool call (%(default)s)",
    )
    manager.add_argument(
        "--mcp_auth_token_env",
        default=tools.mcp_auth_token_env,
        help="environment variable with the bearer token that clients give (%(default)s)",
    )
    return parser


async def _serve(arguments: argparse.Namespace) -> None:
    from agentrl.bounded_http import bind, serve_until_signal
    from agentrl.tools.config import load_servers
    from agentrl.tools.manager_server import Nodes, manager_app

    config = ToolConfig(
        mcp_servers_file=arguments.mcp_servers_file,
        tool_timeout_seconds=float(arguments.tool_timeout_seconds),
    )
    token = os.environ.get(arguments.mcp_auth_token_env)
    listener = bind(arguments.host, arguments.port, "the manager")
    nodes = Nodes(
        load_servers(arguments.mcp_servers_file),
        config,
        idle_seconds=arguments.idle_seconds,
        most=arguments.max_nodes,
    )
    await nodes.open()
    if token is None and arguments.host not in _LOOPBACK:
        logger.warning(
            "every machine that reaches %s can call these tools; export %s=TOKEN",
            arguments.host,
            arguments.mcp_auth_token_env,
        )
    print(f"manager: http://{arguments.host}:{listener.getsockname()[1]}/mcpapi", flush=True)
    await serve_until_signal(manager_app(nodes, token), listener, lambda: None)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number
