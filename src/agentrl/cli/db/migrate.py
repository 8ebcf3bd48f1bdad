"""``agentrl db migrate``: brings a run that an older AgentRL made to this one's schema."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.config.schema import RunConfig


def register(subparsers: Any) -> None:
    """Add the subcommand ``migrate``."""
    parser = subparsers.add_parser("migrate", help="bring a run of an older version to this one's schema")
    parser.add_argument("--dry_run", action="store_true", help="say what would be done, do nothing")
    parser.set_defaults(handler=migrate)


async def migrate(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Run the migrations that are due and print what each did."""
    from agentrl.store.admin.migrate import Migrations
    from agentrl.store.client import open_existing
    from agentrl.store.names import SCHEMA_VERSION

    async with await open_existing(run, any_version=True) as store:
        migrations = Migrations(store.connection)
        if arguments.dry_run:
            for migration in await migrations.pending():
                print(f"due: {migration.origin} → {migration.target}: {migration.what}")
            return 0
        for done in await migrations.run():
            step = done.migration
            print(f"{step.origin} → {step.target}: {step.what}: {done.changed} documents")
    print(f"{run.run_name} has schema version {SCHEMA_VERSION}")
    return 0
