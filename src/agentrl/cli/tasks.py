"""``agentrl tasks load``, ``check`` and ``list``: load tasks, check a source, count what is loaded."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, replace
from typing import Any

from agentrl.cli.tasks_check import check
from agentrl.config.load import CommandParser, group_of
from agentrl.config.run import DATABASE_FLAGS
from agentrl.config.schema import ContainerConfig, JsonFlags, ModelConfig, RunConfig, TaskConfig, flag
from agentrl.environments.harbor.machine import use_containers
from agentrl.observe.progress import progress
from agentrl.observe.terminal import clean
from agentrl.permissions import flags_allowing

SOURCE = (
    "a JSONL, JSON, Parquet, CSV or Arrow file, FOLDER[:SPLIT], hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT], a"
    " folder or git bundle of Harbor tasks, or env:NAME?n=1000&seed=1, in quotes"
)


READING = ("task_fields", "task_preset", "import_modules")
"""The flags by which the rows of a source are read."""


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How tasks are loaded."""

    split: str = flag("train", "train, eval, …")
    no_shuffle: bool = flag(False, "keep the order of the file")
    update: bool = flag(False, "change loaded tasks that have not begun")
    append: bool = flag(False, "add tasks that the run does not have")


def main(argv: list[str]) -> int:
    """Run ``load``, ``check`` or ``list``."""
    arguments = _parser().parse_args(argv)
    return asyncio.run({"load": _load, "check": check, "list": _list}[arguments.action](arguments))


def _parser() -> CommandParser:
    database = CommandParser(add_help=False)
    database.add_flags(RunConfig, "run_name", required=True)
    database.add_flags(RunConfig, *DATABASE_FLAGS)
    parser = CommandParser(
        prog="agentrl tasks", description="The tasks of a run, and of a source before they are loaded."
    )
    actions = parser.add_subparsers(dest="action", required=True, parser_class=CommandParser)
    load = actions.add_parser("load", parents=[database], help="load a task file, or tasks of an environment")
    load.add_argument("file", help=SOURCE)
    load.add_flags(LoadFlags)
    load.add_flags(TaskConfig, "num_generations", "skip_bad_lines", *READING)
    load.add_flags(RunConfig, "seed")
    load.add_flags(ContainerConfig)
    checked = actions.add_parser(
        "check", help="say what is in the tasks of a source; exit code 1: it would not load"
    )
    checked.add_argument("file", help=SOURCE)
    checked.add_flags(TaskConfig, "eval_file", *READING)
    checked.add_flags(ModelConfig, "model_name_or_path")
    checked.add_flags(ContainerConfig)
    checked.add_flags(JsonFlags)
    counts = actions.add_parser("list", parents=[database], help="count the run's tasks by split and state")
    counts.add_flags(JsonFlags)
    return parser


async def _load(arguments: argparse.Namespace) -> int:
    tasks = group_of(TaskConfig, arguments)
    use_containers(group_of(ContainerConfig, arguments))
    from agentrl.rollout.load_tasks import read_source, store_tasks
    from agentrl.store.client import open_store

    with progress(f"reading {arguments.file}"):
        tasks = replace(tasks, shuffle_tasks=not arguments.no_shuffle)
        result = await read_source(arguments.file, tasks, split=arguments.split, seed=arguments.seed)
    if result.reading is not None:
        print(clean(result.reading))
    for warning in result.warnings:
        print(f"warning  {warning}")
    async with await open_store(group_of(RunConfig, arguments)) as store:
        if arguments.split == "train":
            await store.settings.begin("tasks", {"num_generations": tasks.num_generations}, "tasks")
        with progress(f"storing tasks in run {arguments.run_name}"):
            loaded, refused = await store_tasks(
                store, result, update=arguments.update, append=arguments.append
            )
    if refused:
        flags = clean(flags_allowing(refused))
        print(f"warning  this user may not write Imports: start samplers with {flags}")
    for reason in result.skipped:
        print(f"skipped  {reason}")
    for task_id in loaded.left:
        print(f"left     {clean(task_id)}: its text differs, and it has begun")
    if loaded.withdrawn:
        print(f"left out  {loaded.withdrawn} tasks that were withdrawn (agentrl retract)")
    updated = f", {loaded.updated} of them updated" if arguments.update else ""
    print(
        f"{arguments.run_name}/{arguments.split}: {loaded.inserted} tasks loaded,"
        f" {loaded.existing} there already{updated}, {len(result.skipped)} skipped"
    )
    return 0


async def _list(arguments: argparse.Namespace) -> int:
    from agentrl.observe.terminal import print_json
    from agentrl.store.client import open_store

    async with await open_store(group_of(RunConfig, arguments)) as store:
        rows: list[dict[str, Any]] = [
            {"split": split, "epoch": epoch, "tasks": await store.tasks.counts(split, epoch)}
            for split in await store.tasks.splits()
            for epoch in await store.tasks.epochs(split)
        ]
    if arguments.json:
        print_json({"run_name": arguments.run_name, "epochs": rows})
    elif not rows:
        print(f"{arguments.run_name}: no tasks\n  → agentrl tasks load FILE.jsonl --run_name …")
    else:
        for row in rows:
            states = "  ".join(f"{status.value} {count}" for status, count in row["tasks"].items())
            print(f"{row['split']}  epoch {row['epoch']}  {states}")
    return 0
