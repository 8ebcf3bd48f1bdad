"""``agentrl db SUBCOMMAND``: checks, copies and mends the database of one run."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.cli.db import accept, check, export, migrate, prune, reopen, rescore, users
from agentrl.config.load import CommandParser
from agentrl.config.schema import RunConfig

SUBCOMMANDS = (check, export, prune, rescore, reopen, users, migrate, accept)
"""Each has ``register(subparsers)``, which adds its parser and sets ``handler`` on it: a coroutine function
``handler(run: RunConfig, arguments: argparse.Namespace) -> int``, whose result is the exit code.
"""


class DatabaseParser(CommandParser):
    """The parser of one subcommand: it comes with the flags that say which database is meant."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_argument("--run_name", required=True, help="the run: the name of its database")
        self.add_argument("--db_connection_string", help="MongoDB URI (default: the embedded server)")
        self.add_argument("--mongo_dir", default=".agentrl/mongo", help="folder of the embedded MongoDB")
        self.add_argument(
            "--db_timeout_seconds",
            type=float,
            default=30.0,
            help="how long one database operation may take (%(default)s)",
        )


def main(argv: list[str]) -> int:
    """Run one subcommand; its handler's result is the exit code."""
    arguments = parser().parse_args(argv)
    run = RunConfig(
        run_name=arguments.run_name, db_connection_string=arguments.db_connection_string,
        mongo_dir=arguments.mongo_dir, db_timeout_seconds=arguments.db_timeout_seconds,
    )  # fmt: skip
    return int(asyncio.run(arguments.handler(run, arguments)))


def parser() -> CommandParser:
    """The parser of ``agentrl db`` with every subcommand."""
    outer = CommandParser(prog="agentrl db", description="The database of a run.")
    subparsers = outer.add_subparsers(
        dest="subcommand", metavar="SUBCOMMAND", required=True, parser_class=DatabaseParser
    )
    for module in SUBCOMMANDS:
        module.register(subparsers)
    return outer
