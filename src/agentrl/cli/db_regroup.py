"""``agentrl db rescore`` and ``agentrl db reopen``: change scores or slots, and decide their groups again."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.config.load import group_of
from agentrl.config.schema import ClaimConfig, RunConfig, SamplingConfig, TaskConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.data.rescore import RescoreReport

KINDS = (
    "engine", "tool", "environment", "scorer", "timeout", "trajectory", "image", "lease", "internal", "group",
    "column", "feedback", "session",
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
    from agentrl.data.rescore import RescoreOptions, rescore_run
    from agentrl.documents.status import RecordStatus
    from agentrl.documents.task import scorer_weights
    from agentrl.permissions import allow
    from agentrl.registry import import_modules
    from agentrl.scoring.scorers import require_scorer
    from agentrl.store.admin.rescore import SCORED
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

    from agentrl.rollout.scoring import score_queued
    from agentrl.store.admin.reopen import Reopening
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
    from agentrl.store.admin.reopen import Reopening
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
