"""``agentrl dashboard``: serve web pages about the runs of a MongoDB server. Reads, never writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.config.load import CommandParser, group_of
from agentrl.config.run import DATABASE_FLAGS
from agentrl.config.schema import RunConfig


def main(argv: list[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    arguments = _parser().parse_args(argv)
    from agentrl.dashboard.serve import serve

    asyncio.run(
        serve(
            group_of(RunConfig, arguments),
            _announce,
            host=arguments.host,
            port=arguments.port,
            token_file=arguments.token_file,
            hosts=tuple(name for name in arguments.allowed_hosts.split(",") if name),
        )
    )
    return 0


def _announce(address: str) -> None:
    print(f"dashboard: {address}\nopen this link to log in; Ctrl-C ends it", flush=True)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="agentrl dashboard", description="Web pages about the runs of a MongoDB server; reads only."
    )
    parser.add_flags(RunConfig, *DATABASE_FLAGS)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, help="port (default: 8900, or the next free one)")
    parser.add_argument(
        "--token_file",
        type=Path,
        help="file with the token of the login link (default: a new one, which is printed)",
    )
    parser.add_argument(
        "--allowed_hosts", default="", help="further host names of this machine, separated by commas"
    )
    return parser
