"""``agentrl dashboard``: serve web pages about the runs of a MongoDB server. Reads, never writes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.load import CommandParser, group_of
from agentrl.config.run import DATABASE_FLAGS
from agentrl.config.schema import RunConfig, flag


@dataclass(frozen=True, kw_only=True)
class DashboardFlags:
    """Where the pages are, and who may read them."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int | None = flag(None, "port (default: 8900, or the next free one)")
    token_file: str | None = flag(
        None, "file with the token of the login link (default: a new one, which is printed)"
    )
    allowed_hosts: str = flag("", "further host names of this machine, separated by commas")


def main(argv: list[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    arguments = _parser().parse_args(argv)
    from agentrl.dashboard.serve import serve

    flags = group_of(DashboardFlags, arguments)
    asyncio.run(
        serve(
            group_of(RunConfig, arguments),
            _announce,
            host=flags.host,
            port=flags.port,
            token_file=None if flags.token_file is None else Path(flags.token_file),
            hosts=tuple(name for name in flags.allowed_hosts.split(",") if name),
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
    parser.add_flags(DashboardFlags)
    return parser
