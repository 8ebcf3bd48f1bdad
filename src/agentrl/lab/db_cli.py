"""``agentrl db SUBCOMMAND``: check, copy, prune, rescore and reopen the database of one run."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.load import CommandParser, group_of
from agentrl.config.schema import ClaimConfig, RunConfig, SamplingConfig, TaskConfig
from agentrl.documents.run import SETTINGS
from agentrl.errors import ConfigError
from agentrl.observe.progress import progress
from agentrl.observe.terminal import print_json

if TYPE_CHECKING:
    from agentrl.lab.check.reading import CheckOptions
    from agentrl.lab.rescore import RescoreReport
    from agentrl.lab.transfer import Manifest


def main(argv: list[str]) -> int:
    """Run one subcommand; its handler's result is the exit code."""
    arguments = parser().parse_args(argv)
    return int(asyncio.run(arguments.handler(group_of(RunConfig, arguments), arguments)))


class _DatabaseParser(CommandParser):
    """The parser of one subcommand, with the flags that name the database."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_flags(RunConfig, "run_name", required=True)
        self.add_database()


def parser() -> CommandParser:
    """Return the parser of ``agentrl db`` with every subcommand.

    Each subcommand sets ``handler``, a coroutine function of (RunConfig, arguments) that returns the exit
    code.
    """
    outer = CommandParser(prog="agentrl db", description="The database of a run.")
    subparsers = outer.add_subparsers(
        dest="subcommand", metavar="SUBCOMMAND", required=True, parser_class=_DatabaseParser
    )
    for register in (_check, _copy, _prune, add_rescore, add_reopen, _users, _accept):
        register(subparsers)
    return outer


def _check(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check",
        help="verify the invariants of a run, while it goes on or at its end",
        description="Verify every invariant of a run. It only reads, and others may write meanwhile. The exit"
        " code is 0 without a violation, otherwise 1.",
    )
    parser.add_argument("--output_dir", help="the run's output folder: its last checkpoint is read too")
    parser.add_argument(
        "--final", action="store_true", help="the run is over: every slot is terminal, no step is planned"
    )
    parser.add_argument("--skip_files", action="store_true", help="do not hash the files of the weights")
    parser.add_argument(
        "--max_trained_count", type=int,
        help="the run's flag of that name, the largest that it had (as its first trainer stored it)",
    )  # fmt: skip
    parser.add_flags(ClaimConfig, "lease_seconds")
    parser.add_argument(
        "--clock_skew_seconds", type=float, default=5.0,
        help="the largest difference between the clocks of trainer and samplers (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--settle_seconds", type=float, default=3.0,
        help="how long to wait before a suspected violation is checked again (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.set_defaults(handler=check)


async def check(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Print what was checked and every violation; return 0 if there is none, otherwise 1."""
    from agentrl.lab.check.checks import Checks
    from agentrl.store.client import open_existing

    options = check_options(arguments)
    async with await open_existing(run) as store:
        if arguments.max_trained_count is None:
            counts = [item.values.get("max_trained_count", 1) for item in await store.settings.starts()]
            options = replace(options, max_trained_count=max(counts, default=1))
        with progress(f"checking run {run.run_name}"):
            report = await Checks(store.connection).run(options)
    if arguments.json:
        print_json(report.to_json())
    else:
        for line in report.lines():
            print(line)
    return 1 if report.violations else 0


def check_options(arguments: argparse.Namespace) -> CheckOptions:
    """Return the options that the flags of ``check`` name."""
    from agentrl.data.finalize_group import explain_difference
    from agentrl.documents.training import read_checkpoints
    from agentrl.lab.check.reading import CheckOptions

    checkpoints = [] if arguments.output_dir is None else read_checkpoints(Path(arguments.output_dir))
    return CheckOptions(
        compare_tokens=explain_difference,
        verify_files=None if arguments.skip_files else _verify_file,
        checkpoint=checkpoints[-1] if checkpoints else None,
        is_final=arguments.final,
        max_trained_count=arguments.max_trained_count or 1,
        heartbeat_seconds=group_of(ClaimConfig, arguments).heartbeat_seconds,
        clock_skew_seconds=arguments.clock_skew_seconds,
        settle_seconds=arguments.settle_seconds,
    )


def _verify_file(folder: str, file: Mapping[str, Any]) -> str | None:
    """Return how one file of a published folder differs from its checksum; None if it does not."""
    from agentrl.documents.run import FileChecksum
    from agentrl.errors import PublishError
    from agentrl.weights.folder import verify

    try:
        verify(folder, [FileChecksum.from_document(file)])
    except PublishError as error:
        return error.message
    return None


def _copy(subparsers: Any) -> None:
    export = subparsers.add_parser("export", help="write a run into a folder: JSONL files and checksums")
    export.add_argument("folder", metavar="DIR", help="the folder to make; it must not exist, or be empty")
    form = export.add_mutually_exclusive_group()
    form.add_argument(
        "--compress", action="store_true", help="compress each file by xz, to about a tenth: NAME.jsonl.xz"
    )
    form.add_argument(
        "--hf", action="store_true",
        help="write a dataset of the scored trajectories instead: Parquet that datasets.load_dataset reads;"
        " it cannot be imported",
    )  # fmt: skip
    export.set_defaults(handler=export_run)
    load = subparsers.add_parser("import", help="read an exported folder into a new run, --run_name")
    load.add_argument("folder", metavar="DIR", help="a folder that `agentrl db export` wrote")
    load.add_argument(
        "--allow_modules", action="store_true",
        help="keep its list of code, servers and files that samplers use, and flags that name code: only for"
        " a folder that you trust",
    )  # fmt: skip
    load.set_defaults(handler=import_run)


async def export_run(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Write the folder and print its contents."""
    from agentrl.lab.transfer import FILE, MANIFEST, TrajectoryDataset, Transfer
    from agentrl.store.client import open_existing

    folder = Path(arguments.folder)
    if arguments.hf:
        async with await open_existing(run) as store:
            with progress(f"exporting run {run.run_name}, trajectories") as work:
                rows = await TrajectoryDataset(store.connection, on_rows=work.advance).export(folder)
        print(f"{run.run_name} → {folder / FILE}: {rows:,} scored trajectories")
        return 0
    async with await open_existing(run) as store:
        with progress(f"exporting run {run.run_name}, documents") as work:
            transfer = Transfer(store.connection, on_documents=work.advance)
            manifest = await transfer.export(folder, compress=arguments.compress)
    _print(manifest)
    print(f"{run.run_name} → {folder}: {_sum(manifest)}; {MANIFEST} has the SHA-256 of each file")
    return 0


async def import_run(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Verify the folder, fill the new database and print its contents."""
    from agentrl.base.user_code import flags_allowing
    from agentrl.lab.transfer import MANIFEST, Transfer
    from agentrl.observe.terminal import clean
    from agentrl.store.client import open_connection

    folder = Path(arguments.folder)
    connection = await open_connection(run)
    try:
        with progress(f"importing run {run.run_name}, documents") as work:
            transfer = Transfer(connection, on_documents=work.advance)
            imported = await transfer.load(folder, allow_modules=arguments.allow_modules)
    finally:
        await connection.close()
    manifest = imported.manifest
    _print(manifest)
    print(f"{folder} → {run.run_name}: {_sum(manifest)}, as {MANIFEST} says")
    if imported.imports and not arguments.allow_modules:
        flags = clean(flags_allowing(imported.imports))
        print(
            f"left out: Imports, by which samplers would use {clean(', '.join(imported.imports))};"
            f" if you trust them, give a sampler {flags}, or repeat the import"
            " with --allow_modules"
        )
    if imported.flags and not arguments.allow_modules:
        print(
            f"left out: the flags of its processes, for they name code: {clean(', '.join(imported.flags))};"
            " `agentrl whatif` and `blame` need the trainer's: if you trust them, repeat the import with"
            " --allow_modules"
        )
    return 0


def _print(manifest: Manifest) -> None:
    for item in manifest.collections:
        print(f"  {item.collection:<40} {item.documents:>10,} documents {item.bytes:>15,} bytes")


def _sum(manifest: Manifest) -> str:
    return f"{manifest.documents:,} documents, {manifest.bytes:,} bytes"


def _prune(subparsers: Any) -> None:
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
    """Delete what nothing needs any more, and print what was freed."""
    from agentrl.documents.training import read_checkpoints
    from agentrl.lab.deletion import Retention
    from agentrl.store.client import open_existing

    days, step = arguments.older_than_days, arguments.before_step
    if days is None and step is None:
        raise ConfigError(
            "nothing says what may go", hint="give --older_than_days N, --before_step N, or both"
        )
    if days is not None and days < 0:
        raise ConfigError(f"--older_than_days is {days:g}", hint="give --older_than_days 0 or more")
    output = Path(run.output)
    # a resume from the oldest checkpoint trains all later steps again
    last_step = min((checkpoint.state.step for checkpoint in read_checkpoints(output)), default=None)
    if last_step is None:
        print(f"there is no checkpoint under {output}: nothing that was trained is deleted")
    async with await open_existing(run) as store:
        retention = Retention(store.connection)
        pruned = await retention.prune(
            last_step=last_step or 0, older_than_days=days, before_step=step, dry_run=arguments.dry_run
        )
        images, image_bytes = await retention.prune_images(dry_run=arguments.dry_run)
    said = "would be deleted" if arguments.dry_run else "deleted"
    print(
        f"{said}: {pruned.calls:,} model calls, {pruned.data:,} training documents and {pruned.files:,} files"
        f" of {pruned.trajectories:,} trajectories, {pruned.bytes:,} bytes"
    )
    if images:
        print(f"{said}: {images:,} images that nothing names, {image_bytes:,} bytes")
    return 0


def _users(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "users",
        help="list the users of a run; --create makes one for each kind of process and people",
        description="Lists users. With --create, makes the roles and users agentrl_sampler, agentrl_trainer,"
        " agentrl_engine, agentrl_auditor and agentrl_annotator, each with the rights that it needs."
        " Passwords come from AGENTRL_SAMPLER_PASSWORD and the like, or are generated and shown this once.",
    )
    parser.add_argument("--create", action="store_true", help="make them, or bring their rights up to date")
    parser.add_argument("--all_runs", action="store_true", help="for every run of the server, new ones too")
    parser.add_argument(
        "--new_run", action="store_true", help="with --create: first make the run's database if there is none"
    )
    parser.set_defaults(handler=users)


async def users(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Print the users, or make them and print their connection strings."""
    from agentrl.lab.database_server import Users
    from agentrl.store.client import open_connection, open_existing, open_store

    if arguments.create and arguments.all_runs:
        connection = await open_connection(run)
        try:
            created = await Users(connection).create(all_runs=True)
        finally:
            await connection.close()
    else:
        makes_run = arguments.create and arguments.new_run
        async with await (open_store(run) if makes_run else open_existing(run)) as store:
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


def _accept(subparsers: Any) -> None:
    parser = subparsers.add_parser("accept", help="let the next process set settings of the run anew")
    parser.add_argument("concern", nargs="+", choices=SETTINGS, help=f"one or more of: {', '.join(SETTINGS)}")
    parser.set_defaults(handler=accept)


async def accept(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Delete the settings and print what they were."""
    from agentrl.observe.terminal import clean
    from agentrl.store.client import open_existing

    async with await open_existing(run) as store:
        for concern in arguments.concern:
            forgotten = await store.settings.forget(concern)
            if forgotten is None:
                print(f"{concern}: the run has none")
                continue
            values = ", ".join(f"{name} {value!r}" for name, value in forgotten.values.items())
            print(clean(f"{concern}: the next process sets its own; it was {values} (by {forgotten.by})"))
    return 0


KINDS = (
    "engine", "tool", "environment", "harness", "scorer", "timeout", "trajectory", "image", "lease",
    "internal", "group", "column", "feedback", "session", "replay", "poison",
)  # fmt: skip


def add_rescore(subparsers: Any) -> None:
    """Add ``agentrl db rescore``."""
    parser = subparsers.add_parser("rescore", help="score stored trajectories again from their final answers")
    parser.add_argument("--scorer", help="a name or a path module:function (default: each task's own)")
    parser.add_argument("--from_labels", "--from-labels", action="store_true", help="take the scores that"
                        " people gave with their labels; Records without one keep theirs")  # fmt: skip
    parser.add_argument("--split", help="only this split (default: all)")
    parser.add_argument("--status", action="append", choices=("scored", "ready", "abandoned", "failed"),
                        default=[], help="only Records in this state; may be repeated. failed: those that"
                        " could not be scored; they are scored with the scorer of their task")  # fmt: skip
    parser.add_argument("--task", action="append", default=[], help="only this Task's; may be repeated")
    parser.add_argument("--record", action="append", default=[], help="only this Record; may be repeated")
    parser.add_argument("--concurrency", type=int, default=16, help="scorings at a time (%(default)s)")
    parser.add_flags(SamplingConfig, "scorer_timeout_seconds", "agent_config_path")
    parser.add_flags(TaskConfig, "import_modules", "allowed_modules")
    parser.add_argument("--dry_run", action="store_true", help="score and compare, write nothing")
    parser.set_defaults(handler=rescore)


async def rescore(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Score, write and print a table; return 1 if some Records could not be scored."""
    from agentrl.base.registry import import_modules
    from agentrl.base.user_code import allow
    from agentrl.documents.status import RecordStatus
    from agentrl.documents.task import scorer_weights
    from agentrl.lab.regroup import SCORED
    from agentrl.lab.rescore import RescoreOptions, rescore_run
    from agentrl.scoring.scorers import require_scorer
    from agentrl.store.client import open_existing

    if arguments.from_labels and (arguments.scorer is not None or "failed" in arguments.status):
        raise ConfigError(
            "--from_labels goes with neither --scorer nor --status failed: people give the scores",
            hint="leave --from_labels out, or the other flag",
        )
    tasks = group_of(TaskConfig, arguments)
    import_modules(tasks.imported_modules)
    allow(tasks.allowed_names)
    if "failed" in arguments.status:
        return await _score_failed(run, arguments)
    if arguments.scorer is not None:
        allow(scorer_weights(arguments.scorer))
        require_scorer(arguments.scorer)
    options = RescoreOptions(
        scorer=arguments.scorer,
        from_labels=arguments.from_labels,
        split=arguments.split,
        statuses=[RecordStatus(status) for status in arguments.status] or SCORED,
        tasks=arguments.task,
        records=arguments.record,
        concurrency=arguments.concurrency,
        scorer_timeout_seconds=arguments.scorer_timeout_seconds,
        agent_config_path=arguments.agent_config_path,
        dry_run=arguments.dry_run,
    )
    async with await open_existing(run) as store:
        allow(await store.imports.paths())
        report = await rescore_run(store, options)
    _print_rescored(report, "Rescored, nothing written" if options.dry_run else "Rescored")
    return 1 if report.errors else 0


def _print_rescored(report: RescoreReport, title: str) -> None:
    """Print a row per split, and what is to be said of the run."""
    from agentrl.observe.terminal import clean, fixed, stdout_console, table

    rows = [
        [name, len(split.old), fixed(split.old_mean), fixed(split.new_mean), split.changed,
         split.decided_again, sum(split.kept.values())]
        for name, split in sorted(report.splits.items())
    ]  # fmt: skip
    columns = ["split", "Records", "old mean", "new mean", "scores changed", "groups decided again",
               "groups left"]  # fmt: skip
    stdout_console().print(table(title, columns, rows))
    for line in report.remarks():
        print(clean(line))


async def _score_failed(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Queue and score what failed in scoring; return 1 if some of it has no score afterwards."""
    import asyncio

    from agentrl.columns.scores import score_queued
    from agentrl.lab.regroup import Reopening
    from agentrl.store.client import open_existing

    if arguments.status != ["failed"] or arguments.scorer is not None:
        raise ConfigError(
            "--status failed goes with no other --status and no --scorer: what has no score gets it from the"
            " scorer of its task",
            hint="run agentrl db rescore once for --status failed, and again for the rest",
        )
    sampling = replace(group_of(SamplingConfig, arguments), max_concurrent_scorings=arguments.concurrency)
    async with await open_existing(run) as store:
        done = await Reopening(store.connection).requeue(
            split=arguments.split, tasks=arguments.task, records=arguments.record, dry_run=arguments.dry_run
        )
        scored = 0
        for split in [] if arguments.dry_run else done.by_split:
            scored += await score_queued(
                store, sampling, ClaimConfig(), split, asyncio.Event(), until_empty=True
            )
    for why, groups in done.left.items():
        print(f"left as they are: {groups} groups ({why})")
    queued = sum(done.by_split.values())
    if arguments.dry_run:
        print(f"would be scored: {queued} trajectories")
        return 0
    print(f"scored: {scored} of {queued} trajectories; a sampler decides their groups")
    return 0 if scored >= queued else 1


def add_reopen(subparsers: Any) -> None:
    """Add ``agentrl db reopen``."""
    parser = subparsers.add_parser("reopen", help="open slots that failed for good, with all their attempts")
    parser.add_argument(
        "--failure_kind", "--failure-kind", action="append", choices=KINDS, default=[],
        help="only slots whose last attempt failed like this; 'group': groups that could not be finalized,"
        " 'column': columns that were given up; 'feedback': conversations that nobody rated wait for feedback"
        " again; may be repeated (default: any)",
    )  # fmt: skip
    parser.add_argument("--split", help="only this split (default: all)")
    waits = "how long conversations wait for feedback again, from now, in hours (%(default)s)"
    parser.add_flags(SamplingConfig, "feedback_hours", help=waits)
    parser.add_argument("--dry_run", action="store_true", help="say what would be opened, open nothing")
    parser.set_defaults(handler=reopen)


async def reopen(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Open the slots and print how many."""
    from agentrl.lab.regroup import Reopening
    from agentrl.store.client import open_existing

    async with await open_existing(run) as store:
        done = await Reopening(store.connection).reopen(
            arguments.failure_kind,
            split=arguments.split,
            feedback_hours=arguments.feedback_hours,
            dry_run=arguments.dry_run,
        )
    said = "would be reopened" if arguments.dry_run else "reopened"
    print(f"{said}: {done.slots} slots of {done.groups} groups, {done.finalized} of which had been finalized")
    if done.conversations:
        hours = f"{arguments.feedback_hours:g} h from now"
        print(f"{said}: {done.conversations} conversations; they wait for feedback again, at most {hours}")
    if done.columns:
        print(f"{said}: {done.columns} columns that were given up; their groups wait for them again")
    if done.given_up:
        print(f"{said}: {done.given_up} groups that could not be finalized; they are tried again")
    if done.data:
        print(f"{done.data} training documents of these groups are deleted; they are made again from all")
    for why, groups in done.left.items():
        print(f"left as they are: {groups} groups ({why})")
    return 0
