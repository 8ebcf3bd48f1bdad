"""``agentrl dashboard``: web pages about the runs of a MongoDB server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.flags import names_in
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


def parser() -> CommandParser:
    """Return the parser of ``agentrl dashboard``."""
    parser = CommandParser(
        prog="agentrl dashboard", description="Web pages about the runs of a MongoDB server; reads only."
    )
    parser.add_flags(RunConfig, *DATABASE_FLAGS)
    parser.add_flags(DashboardFlags)
    return parser


def main(argv: list[str]) -> int:
    """Serve web pages about the runs of a MongoDB server until SIGINT or SIGTERM."""
    arguments = parser().parse_args(argv)
    from agentrl.screens.dashboard.serve import serve as serve_pages

    flags = group_of(DashboardFlags, arguments)
    asyncio.run(
        serve_pages(
            group_of(RunConfig, arguments),
            _announce,
            host=flags.host,
            port=flags.port,
            token_file=None if flags.token_file is None else Path(flags.token_file),
            hosts=tuple(names_in(flags.allowed_hosts)),
        )
    )
    return 0


def _announce(address: str) -> None:
    print(f"dashboard: {address}\nopen this link to log in; Ctrl-C ends it", flush=True)
