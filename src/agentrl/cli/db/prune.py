"""``agentrl db prune``: retention by age or step; what waits to be trained is never touched."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config.schema import RunConfig


def register(subparsers: Any) -> None:
    """Add the subcommand ``prune``."""
    parser = subparsers.add_parser(
        "prune", help="delete calls and data of trajectories that are trained, stale, abandoned or failed"
    )
    parser.add_argument("--older_than_days", type=float, help="only trajectories begun longer ago than this")
    parser.add_argument("--before_step", type=int, help="only what steps before this one trained, or dates"
                        " from before it")  # fmt: skip
    parser.add_argument("--output_dir", help="the run's output folder, for its checkpoints (output/RUN_NAME)")
    parser.add_argument("--dry_run", action="store_true", help="say what would be deleted, delete nothing")
    parser.set_defaults(handler=prune)


async def prune(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Delete, and print what was freed."""
    from agentrl.store.admin.retention import Retention
    from agentrl.store.client import open_existing

    days, step = arguments.older_than_days, arguments.before_step
    if days is None and step is None:
        raise ConfigError(
            "nothing says what may go", hint="give --older_than_days N, --before_step N, or both"
        )
    if days is not None and days < 0:
        raise ConfigError(f"--older_than_days is {days:g}", hint="give --older_than_days 0 or more")
    output = Path(arguments.output_dir or run.output)
    last_step = oldest_checkpoint(output)
    if last_step is None:
        print(f"there is no checkpoint under {output}: nothing that was trained is deleted")
    async with await open_existing(run) as store:
        retention = Retention(store.connection)
        limits = await retention.limits(last_step=last_step or 0, older_than_days=days, before_step=step)
        pruned = await retention.prune(limits, dry_run=arguments.dry_run)
    said = "would be deleted" if arguments.dry_run else "deleted"
    print(
        f"{said}: {pruned.calls:,} model calls, {pruned.data:,} training documents and {pruned.files:,} files"
        f" of {pruned.trajectories:,} trajectories, {pruned.bytes:,} bytes"
    )
    return 0


def oldest_checkpoint(output: Path) -> int | None:
    """The step of the oldest complete checkpoint: training may resume from it, and do later steps again."""
    steps = []
    for path in output.glob("checkpoint-*/state.json"):
        try:
            steps.append(int(json.loads(path.read_text(encoding="utf-8"))["step"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}", hint="mend or delete that checkpoint"
            ) from error
    return min(steps, default=None)
