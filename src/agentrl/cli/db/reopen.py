"""``agentrl db reopen``: slots that failed for good may be sampled again."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.config.schema import RunConfig

KINDS = ("engine", "tool", "scorer", "timeout", "trajectory", "lease", "internal", "group")


def register(subparsers: Any) -> None:
    """Add the subcommand ``reopen``."""
    parser = subparsers.add_parser("reopen", help="open slots that failed for good, with all their attempts")
    parser.add_argument(
        "--failure_kind", "--failure-kind", action="append", choices=KINDS, default=[],
        help="only slots whose last attempt failed like this; 'group': groups that could not be finalized;"
        " may be repeated (default: any)",
    )  # fmt: skip
    parser.add_argument("--split", help="only this split (default: all)")
    parser.add_argument("--dry_run", action="store_true", help="say what would be opened, open nothing")
    parser.set_defaults(handler=reopen)


async def reopen(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Open the slots and print how many."""
    from agentrl.store.admin.reopen import Reopening
    from agentrl.store.client import open_existing

    async with await open_existing(run) as store:
        done = await Reopening(store.connection).reopen(
            arguments.failure_kind, split=arguments.split, dry_run=arguments.dry_run
        )
    said = "would be reopened" if arguments.dry_run else "reopened"
    print(f"{said}: {done.slots} slots of {done.groups} groups, {done.finalized} of which had been finalized")
    if done.given_up:
        print(f"{said}: {done.given_up} groups that could not be finalized; they are tried again")
    if done.data:
        print(f"{done.data} training documents of these groups are deleted; they are made again from all")
    for why, groups in done.left.items():
        print(f"left as they are: {groups} groups ({why})")
    return 0
