"""``agentrl db rescore``: stored trajectories scored again, by the same scorer or another."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentrl.documents.model_call import full_messages
from agentrl.errors import ConfigError, GroupError, ScorerError, StoreError

if TYPE_CHECKING:
    from agentrl.config.schema import RunConfig
    from agentrl.documents.model_call import DispatchedSamplingTask
    from agentrl.documents.record import Record
    from agentrl.documents.task import Task
    from agentrl.scoring.scorers import ScorerContext
    from agentrl.store.admin.rescore import NewScore, Rescored, Rescoring
    from agentrl.store.groups import Decide, StoredGroup

_GROUPS_AT_A_TIME = 8
_ERRORS_SHOWN = 5


def register(subparsers: Any) -> None:
    """Add the subcommand ``rescore``."""
    parser = subparsers.add_parser("rescore", help="score stored trajectories again from their final answers")
    parser.add_argument("--scorer", help="a name or a path module:function (default: each task's own)")
    parser.add_argument("--split", help="only this split (default: all)")
    parser.add_argument("--status", action="append", choices=("scored", "ready", "abandoned"), default=[],
                        help="only Records in this state; may be repeated")  # fmt: skip
    parser.add_argument("--task", action="append", default=[], help="only this Task's; may be repeated")
    parser.add_argument("--record", action="append", default=[], help="only this Record; may be repeated")
    parser.add_argument("--concurrency", type=int, default=16, help="scorings at a time (%(default)s)")
    parser.add_argument("--scorer_timeout_seconds", type=float, default=120.0, help="(%(default)s)")
    parser.add_argument(
        "--agent_config_path", default="assets/agent_config.yml", help="the judge's endpoints"
    )
    parser.add_argument(
        "--allowed_modules", default="", help="modules, separated by commas, that rules may name a filter of"
    )
    parser.add_argument("--dry_run", action="store_true", help="score and compare, write nothing")
    parser.set_defaults(handler=rescore)


@dataclass(slots=True, kw_only=True)
class _Split:
    """What became of one split's Records."""

    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    changed: int = 0
    decided_again: int = 0
    kept: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Run:
    """One rescoring: where, by what, and what came of it."""

    rescoring: Rescoring
    arguments: argparse.Namespace
    scorings: asyncio.Semaphore
    splits: dict[str, _Split] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


async def rescore(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Score, write and print a table; 1 if some Records could not be scored."""
    from agentrl.documents.status import RecordStatus
    from agentrl.observe.terminal import stdout_console
    from agentrl.registry import allow_imports
    from agentrl.scoring.scorers import SCORERS
    from agentrl.store.admin.rescore import SCORED, Rescoring
    from agentrl.store.client import open_existing

    allow_imports(name.strip() for name in arguments.allowed_modules.split(",") if name.strip())
    allow_imports({arguments.scorer} if arguments.scorer else {})
    if arguments.scorer is not None:
        SCORERS.get(arguments.scorer)
    arguments.status = [RecordStatus(status) for status in arguments.status] or list(SCORED)
    async with await open_existing(run) as store:
        allow_imports(await store.imports.paths())
        state = _Run(Rescoring(store.connection), arguments, asyncio.Semaphore(max(1, arguments.concurrency)))
        tasks = await state.rescoring.tasks(
            split=arguments.split, tasks=arguments.task, records=arguments.record, statuses=arguments.status
        )
        if not tasks:
            raise StoreError(
                f"run {run.run_name!r} has no scored Record like that",
                hint="`agentrl audit records --status ready` lists Records",
            )
        for start in range(0, len(tasks), _GROUPS_AT_A_TIME):
            await asyncio.gather(
                *(_rescore_group(state, task) for task in tasks[start : start + _GROUPS_AT_A_TIME])
            )
    stdout_console().print(_table(state.splits, arguments.dry_run))
    for line in _remarks(state):
        print(line)
    return 1 if state.errors else 0


async def _rescore_group(state: _Run, task_id: str) -> None:
    group = await state.rescoring.group(
        task_id, records=state.arguments.record, statuses=state.arguments.status
    )
    scores = await _scores(state, group)
    try:
        done = await state.rescoring.apply(
            task_id, scores, _decide_by(group.task), dry_run=state.arguments.dry_run
        )
    except (ConfigError, GroupError) as error:
        state.errors.append(f"{task_id}: {error.message}")
        return
    _count(state.splits.setdefault(group.task.split, _Split()), group, scores, done)


async def _scores(state: _Run, group: StoredGroup) -> dict[str, NewScore]:
    from agentrl.scoring.scorers import run_scorer
    from agentrl.store.admin.rescore import NewScore

    arguments = state.arguments
    name = arguments.scorer or group.task.scorer

    async def score(record: Record) -> tuple[str, NewScore] | None:
        context = scorer_context(
            group.task, record, group.calls.get(record.id, ()), arguments.agent_config_path
        )
        async with state.scorings:
            try:
                result = await run_scorer(name, context, arguments.scorer_timeout_seconds)
            except (ConfigError, ScorerError) as error:
                state.errors.append(f"{record.id}: {error.message}")
                return None
        return record.id, NewScore(score=result.score, details=result.details)

    results = await asyncio.gather(*(score(record) for record in group.records))
    return dict(result for result in results if result is not None)


def scorer_context(
    task: Task, record: Record, calls: Sequence[DispatchedSamplingTask], agent_config_path: str
) -> ScorerContext:
    """What a scorer saw of the trajectory, out of what is stored; no messages where they were pruned."""
    from agentrl.scoring.scorers import ScorerContext

    first = max((number for number, call in enumerate(calls) if call.parent is None), default=0)
    messages = [
        message
        for parent, call in zip((None, *calls[first:]), calls[first:], strict=False)
        for message in (*full_messages(call, parent), {"role": "assistant", **call.response})
    ]
    return ScorerContext(
        query=task.query,
        final_answer=record.final_answer,
        answer=task.answer,
        aug_answers=task.aug_answers,
        messages=tuple(messages),
        meta=task.meta,
        agent_config_path=agent_config_path,
    )


def _decide_by(task: Task) -> Any:
    from agentrl.config.groups import RIGHT_THRESHOLD, GroupConfig
    from agentrl.data.finalize_group import TRAIN_SPLIT, GroupRules

    def decide_by(rules: Mapping[str, Any] | None) -> Decide | None:
        if rules is not None:
            return GroupRules.stored(rules).decide
        if task.split != TRAIN_SPLIT:
            right = float((task.group or {}).get("right_threshold", RIGHT_THRESHOLD))
            return GroupRules(config=GroupConfig(right_threshold=right), seed=0).decide
        return None

    return decide_by


def _count(split: _Split, group: StoredGroup, scores: Mapping[str, NewScore], done: Rescored) -> None:
    for record in group.records:
        if record.id in scores and record.score is not None:
            split.old.append(record.score)
            split.new.append(scores[record.id].score)
            split.changed += record.score != scores[record.id].score
    split.decided_again += done.decided_again
    if done.kept_because is not None:
        split.kept[done.kept_because] = split.kept.get(done.kept_because, 0) + 1


def _table(splits: Mapping[str, _Split], dry_run: bool) -> Any:
    from agentrl.observe.terminal import fixed, table

    rows = [
        [
            name, len(split.old), fixed(fmean(split.old) if split.old else None),
            fixed(fmean(split.new) if split.new else None), split.changed, split.decided_again,
            sum(split.kept.values()),
        ]
        for name, split in sorted(splits.items())
    ]  # fmt: skip
    columns = ["split", "Records", "old mean", "new mean", "scores changed", "groups decided again",
               "groups left"]  # fmt: skip
    return table("Rescored, nothing written" if dry_run else "Rescored", columns, rows)


def _remarks(state: _Run) -> Iterable[str]:
    for name, split in sorted(state.splits.items()):
        for why, groups in split.kept.items():
            yield (
                f"{name}: {groups} groups keep their scores ({why});"
                " the new ones stand beside them as Record.rescored"
            )
    for error in state.errors[:_ERRORS_SHOWN]:
        yield f"not scored  {error}"
    if len(state.errors) > _ERRORS_SHOWN:
        yield f"not scored  {len(state.errors) - _ERRORS_SHOWN} more"
