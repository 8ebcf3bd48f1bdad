"""``agentrl tools manager``: serve tool servers to samplers, with nodes of its own for each trajectory."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass

from agentrl.config.flags import Flags, flag
from agentrl.config.load import CommandParser, group_of
from agentrl.config.sampling import ToolConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ManagerFlags(Flags):
    """Where a manager listens, and how many nodes it keeps."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port; 0: any free one", within="[0, 65535]")
    max_nodes: int = flag(256, "nodes that live at a time", within="[1, inf)")
    idle_seconds: int = flag(
        900, "a node without a call for so long is ended", within="[1, inf)", unit="seconds"
    )


def main(argv: list[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    arguments = parser().parse_args(argv)
    flags, tools = group_of(ManagerFlags, arguments), group_of(ToolConfig, arguments)
    from agentrl.observe.logging import LineFormatter

    console = logging.StreamHandler()
    console.setFormatter(LineFormatter("manager", date_format="%H:%M:%S"))
    logging.getLogger().addHandler(console)
    logging.getLogger("agentrl").setLevel(logging.INFO)
    asyncio.run(_serve(flags, tools))
    return 0


def parser() -> CommandParser:
    parser = CommandParser(prog="agentrl tools", description="Tool servers of many samplers.")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=CommandParser)
    manager = actions.add_parser("manager", help="serve the servers of a file at http://HOST:PORT/mcpapi")
    manager.add_flags(ToolConfig, "mcp_servers_file", required=True)
    manager.add_flags(ManagerFlags)
    manager.add_flags(ToolConfig, "tool_timeout_seconds", "mcp_auth_token_env")
    return parser


async def _serve(flags: ManagerFlags, tools: ToolConfig) -> None:
    from agentrl.base.bounded_http import bind, for_own_hosts, is_loopback, serve_until_signal
    from agentrl.tools.config import load_servers
    from agentrl.worlds.manager_server import Nodes, manager_app

    assert tools.mcp_servers_file is not None
    token = os.environ.get(tools.mcp_auth_token_env)
    listener = bind(flags.host, flags.port, "the manager")
    servers = load_servers(tools.mcp_servers_file)
    nodes = Nodes(servers, tools, idle_seconds=flags.idle_seconds, most=flags.max_nodes)
    await nodes.open()
    if token is None and not is_loopback(flags.host):
        logger.warning(
            "every machine that reaches %s can call these tools; export %s=TOKEN",
            flags.host,
            tools.mcp_auth_token_env,
        )
    print(f"manager: http://{flags.host}:{listener.getsockname()[1]}/mcpapi", flush=True)
    await serve_until_signal(for_own_hosts(manager_app(nodes, token), flags.host), listener, lambda: None)
