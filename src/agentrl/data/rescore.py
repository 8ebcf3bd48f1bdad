"""Scores stored trajectories again, by the same scorer or another, and decides their groups anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from agentrl.batches import batches
from agentrl.data.finalize_group import decide_stored
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    branches_of,
    conversation,
    main_branch,
    of_main_role,
)
from agentrl.documents.record import CALL_ROLES, ROLE_REWARDS, TURN_REWARDS, Record
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import FEEDBACK, Task
from agentrl.errors import ConfigError, GroupError, ScorerError, StoreError
from agentrl.scoring.scorers import ScoredCall, ScorerContext, ScoreResult, checked_score, score_context
from agentrl.store.admin.regroup import SCORED, NewScore, Rescored, Rescoring
from agentrl.store.client import Store
from agentrl.store.groups import StoredGroup

_GROUPS_AT_A_TIME = 8
_ERRORS_SHOWN = 5
LABELS = "labels"
"""The ``scorer`` of ``score_details`` of a score that people gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreOptions:
    """Which Records to score again, and how. Filters that are empty select all."""

    scorer: str | None = None
    """A name or a path ``module:function``; None: each task's own."""
    from_labels: bool = False
    """Take the scores that people gave in Labels; Records without one keep theirs."""
    split: str | None = None
    statuses: Sequence[RecordStatus] = SCORED
    tasks: Sequence[str] = ()
    records: Sequence[str] = ()
    concurrency: int = 16
    scorer_timeout_seconds: float = 120.0
    agent_config_path: str = "assets/agent_config.yml"
    dry_run: bool = False


@dataclass(slots=True, kw_only=True)
class SplitReport:
    """The old and new scores of one split's Records, and counts of groups decided again and kept."""

    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    changed: int = 0
    decided_again: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    """Groups that keep their scores, by reason."""

    @property
    def old_mean(self) -> float | None:
        """The mean of the old scores; None without any."""
        return fmean(self.old) if self.old else None

    @property
    def new_mean(self) -> float | None:
        """The mean of the new scores; None without any."""
        return fmean(self.new) if self.new else None


@dataclass(frozen=True, slots=True)
class RescoreReport:
    """The result of rescoring a run."""

    splits: dict[str, SplitReport] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    """Records and groups that could not be scored or decided, with the reason."""
    writers: Mapping[str, int] = field(default_factory=dict)
    """Who wrote labels with a score, and how many, if labels gave the scores."""

    def remarks(self) -> Iterator[str]:
        """Yield a line for who wrote labels, groups that keep their scores, and the first errors."""
        for who, labels in self.writers.items():
            yield f"{labels} labels of {who}"
        for name, split in sorted(self.splits.items()):
            for why, groups in split.kept.items():
                yield (
                    f"{name}: {groups} groups keep their scores ({why});"
                    " the new ones stand beside them as Record.rescored"
                )
        for error in self.errors[:_ERRORS_SHOWN]:
            yield f"not scored  {error}"
        if len(self.errors) > _ERRORS_SHOWN:
            yield f"not scored  {len(self.errors) - _ERRORS_SHOWN} more"


async def rescore_run(store: Store, options: RescoreOptions) -> RescoreReport:
    """Score the selected Records again, a few groups at a time. Raises StoreError if none is selected."""
    labelled: dict[str, float] | None = None
    report = RescoreReport()
    if options.from_labels:
        labelled = await store.labels.scores()
        report = RescoreReport(writers=await store.labels.writers())
        wanted = [record for record in labelled if not options.records or record in options.records]
        if not wanted:
            raise StoreError(
                f"run {store.run_name!r} has no label with a score among these Records",
                hint="give labels a score in `agentrl dashboard`, on the page of a trajectory",
            )
        options = replace(options, records=wanted)
    rescoring = Rescoring(store.connection)
    tasks = await rescoring.tasks(
        split=options.split, tasks=options.tasks, records=options.records, statuses=options.statuses
    )
    if not tasks:
        raise StoreError(
            f"run {store.run_name!r} has no scored Record like that",
            hint="`agentrl audit records --status ready` lists Records",
        )
    rescorer = _Rescorer(rescoring, options, asyncio.Semaphore(max(1, options.concurrency)), labelled, report)
    for batch in batches(tasks, _GROUPS_AT_A_TIME):
        await asyncio.gather(*map(rescorer.rescore_group, batch))
    return report


@dataclass(frozen=True, slots=True)
class _Rescorer:
    rescoring: Rescoring
    options: RescoreOptions
    slots: asyncio.Semaphore
    labelled: Mapping[str, float] | None
    """The scores that people gave, by Record; None if a scorer gives the scores."""
    report: RescoreReport

    async def rescore_group(self, task_id: str) -> None:
        """Score the Records of one group, write the scores and count the result in the report."""
        options = self.options
        group = await self.rescoring.group(task_id, records=options.records, statuses=options.statuses)
        scores = await self._scores(group)
        try:
            done = await self.rescoring.apply(task_id, scores, decide_stored, dry_run=options.dry_run)
        except (ConfigError, GroupError) as error:
            self.report.errors.append(f"{task_id}: {error.message}")
            return
        _count(self.report.splits.setdefault(group.task.split, SplitReport()), group, scores, done)

    async def _scores(self, group: StoredGroup) -> dict[str, NewScore]:
        results = await asyncio.gather(*(self._score(group, record) for record in group.records))
        return {record.id: new for record, new in zip(group.records, results, strict=True) if new}

    async def _score(self, group: StoredGroup, record: Record) -> NewScore | None:
        options = self.options
        if self.labelled is not None:
            return _labelled(record, self.labelled[record.id])
        calls = group.calls.get(record.id, ())
        context = scorer_context(group.task, record, calls, options.agent_config_path)
        if options.scorer is not None:
            context = replace(context, agent_score=None)
        async with self.slots:
            try:
                result = await score_context(
                    options.scorer or group.task.scorer, context, options.scorer_timeout_seconds
                )
            except (ConfigError, ScorerError) as error:
                self.report.errors.append(f"{record.id}: {error.message}")
                return None
        return NewScore(score=result.score, details=result.details)


def _labelled(record: Record, score: float) -> NewScore:
    """Return the score that people gave; the rewards of turns and roles stay those of the scorer."""
    kept = {
        key: record.score_details[key]
        for key in (TURN_REWARDS, ROLE_REWARDS, CALL_ROLES)
        if key in record.score_details
    }
    return NewScore(score=score, details={"scorer": LABELS, **kept})


def scorer_context(
    task: Task, record: Record, calls: Sequence[DispatchedSamplingTask], agent_config_path: str
) -> ScorerContext:
    """Return the scorer's input, rebuilt from stored documents; without messages if they were pruned."""
    path: Sequence[DispatchedSamplingTask] = of_main_role(calls)
    is_branched = any(call.parent not in (None, before.id) for before, call in pairwise(path))
    if is_branched or record.train_rule is not None:
        main = main_branch(branches_of(path))
        path = () if main is None else main.calls
    first = max((number for number, call in enumerate(path) if call.parent is None), default=0)
    scored = tuple(
        ScoredCall.of(call.response, call.tool_executions, call.status, call.role) for call in calls
    )
    return ScorerContext(
        query=task.query,
        final_answer=record.final_answer,
        answer=task.answer,
        aug_answers=task.aug_answers,
        messages=tuple(conversation(path[first:])),
        calls=scored,
        meta=task.meta,
        environment=task.environment,
        tool_rewards=record.tool_rewards,
        agent_score=record.agent_score or _feedback(task, record, scored),
        agent_config_path=agent_config_path,
    )


def _feedback(task: Task, record: Record, calls: Sequence[ScoredCall]) -> dict[str, Any] | None:
    """Return the score that people gave to a trajectory that waits for their feedback; None without one."""
    reward = record.reported_reward
    if task.scorer != FEEDBACK or reward is None:
        return None
    turns = {int(call): value for call, value in reward.turn_rewards.items()} or None
    given = ScoreResult(reward.score, reward.details, turns, reward.role_rewards or None)
    return {**checked_score(FEEDBACK, given, calls), "scorer": FEEDBACK}


def _count(split: SplitReport, group: StoredGroup, scores: Mapping[str, NewScore], done: Rescored) -> None:
    for record in group.records:
        if record.id in scores and record.score is not None:
            split.old.append(record.score)
            split.new.append(scores[record.id].score)
            split.changed += record.score != scores[record.id].score
    split.decided_again += done.decided_again
    if done.kept_because is not None:
        split.kept[done.kept_because] = split.kept.get(done.kept_because, 0) + 1
