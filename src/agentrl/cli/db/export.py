"""``agentrl db export`` and ``agentrl db import``: a run as a folder, and a folder as a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.config.schema import RunConfig
    from agentrl.store.admin.archive import Manifest


def register(subparsers: Any) -> None:
    """Add the subcommands ``export`` and ``import``."""
    export = subparsers.add_parser("export", help="write a run into a folder: JSONL files and checksums")
    export.add_argument("folder", metavar="DIR", help="the folder to make; it must not exist, or be empty")
    export.set_defaults(handler=export_run)
    load = subparsers.add_parser("import", help="read an exported folder into a new run, --run_name")
    load.add_argument("folder", metavar="DIR", help="a folder that `agentrl db export` wrote")
    load.set_defaults(handler=import_run)


async def export_run(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Write the folder and print what is in it."""
    from agentrl.store.admin.archive import MANIFEST
    from agentrl.store.admin.transfer import Transfer
    from agentrl.store.client import open_existing

    folder = Path(arguments.folder)
    async with await open_existing(run, any_version=True) as store:
        manifest = await Transfer(store.connection).export(folder)
    _print(manifest)
    print(f"{run.run_name} → {folder}: {_sum(manifest)}; {MANIFEST} has the SHA-256 of each file")
    return 0


async def import_run(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Verify the folder, fill the new database and print what is in it."""
    from agentrl.store.admin.archive import MANIFEST
    from agentrl.store.admin.transfer import Transfer
    from agentrl.store.client import open_connection
    from agentrl.store.names import SCHEMA_VERSION

    folder = Path(arguments.folder)
    connection = await open_connection(run)
    try:
        manifest = await Transfer(connection).load(folder)
    finally:
        await connection.close()
    _print(manifest)
    print(f"{folder} → {run.run_name}: {_sum(manifest)}, as {MANIFEST} says")
    if manifest.schema < SCHEMA_VERSION:
        print(f"its schema is of version {manifest.schema}: run `agentrl db migrate` before anything else")
    return 0


def _print(manifest: Manifest) -> None:
    for item in manifest.collections:
        print(f"  {item.collection:<40} {item.documents:>10,} documents {item.bytes:>15,} bytes")


def _sum(manifest: Manifest) -> str:
    return f"{manifest.documents:,} documents, {manifest.bytes:,} bytes"
