"""``agentrl db users``: a user for each kind of process, on a server with authentication."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.config.schema import RunConfig


def register(subparsers: Any) -> None:
    """Add the subcommand ``users``."""
    parser = subparsers.add_parser(
        "users",
        help="list the users of a run; --create makes one for samplers, trainer, engines and auditors",
        description="Lists users. With --create, makes the roles and users agentrl_sampler, agentrl_trainer,"
        " agentrl_engine and agentrl_auditor, each with the rights that its processes need. Passwords come"
        " from AGENTRL_SAMPLER_PASSWORD and the like, or are generated and shown this once.",
    )
    parser.add_argument("--create", action="store_true", help="make them, or bring their rights up to date")
    parser.add_argument("--all_runs", action="store_true", help="for every run of the server, new ones too")
    parser.set_defaults(handler=users)


async def users(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Print the users, or make them and print their connection strings."""
    from agentrl.store.admin.users import Users
    from agentrl.store.client import open_connection, open_existing

    if arguments.create and arguments.all_runs:
        connection = await open_connection(run)
        try:
            created = await Users(connection).create(all_runs=True)
        finally:
            await connection.close()
    else:
        async with await open_existing(run) as store:
            if not arguments.create:
                for name, roles in sorted((await Users(store.connection).existing()).items()):
                    print(f"{name:<32} {', '.join(roles)}")
                return 0
            created = await Users(store.connection).create()
    for user in created:
        print(f"{user.name:<16} {'made   ' if user.is_new else 'updated'} {user.uri}")
    if any(user.password is not None for user in created):
        print("keep the passwords: they are not shown again")
    return 0
