"""Decide stored groups again: by other rules, with other scores, or without some Records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentrl.base.batches import batches
from agentrl.base.concurrency import DECISION_THREADS
from agentrl.data.finalize_group import GroupRules, decide_stored
from agentrl.documents.record import CALL_ROLES, ROLE_REWARDS, TURN_REWARDS, Record
from agentrl.documents.run import Relative
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import CONVERSATIONS, record_task
from agentrl.errors import ConfigError, GroupError, ScorerError, StoreError, TrainingError
from agentrl.lab.flags import GROUP_RULES
from agentrl.scoring.groups import ALONE
from agentrl.scoring.scorers import score_context, stored_context
from agentrl.store.client import Store
from agentrl.store.groups import GroupOutcome, StoredGroup

if TYPE_CHECKING:
    from agentrl.store.client import Store
from agentrl.lab.regroup import SCORED, NewScore, Rescored, Rescoring

SCORER = "scorer"
"""Key of the scorer in ``Relative.changed``."""


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A group as it is decided now. ``scores``: the new score of each Record, if they were scored again."""

    outcome: GroupOutcome
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Regrouping:
    """How groups are decided again; by default none is."""

    rules: Mapping[str, Any] = field(default_factory=dict)
    """Flags of ``GroupConfig`` that replace those that each group was decided by."""
    without: frozenset[str] = frozenset()
    """``_id`` of Records that are left out: their groups are decided as if they had never been sampled."""
    scorer: str | None = None
    """Scores all Records again; None: they keep their scores."""
    scorer_timeout_seconds: float = 60.0
    agent_config_path: str = ""

    @cached_property
    def _tasks(self) -> frozenset[str]:
        return frozenset(map(record_task, self.without))

    def concerns(self, task_id: str) -> bool:
        """Return whether a group is decided again."""
        return bool(self.rules) or self.scorer is not None or task_id in self._tasks

    async def decide(self, store: Store, task_id: str) -> Regrouped:
        """Decide a stored group again.

        Raises TrainingError if its documents are gone or a scorer fails; GroupError or ConfigError for a
        group filter or an advantage of a user that fails.
        """
        group = await store.groups.stored(task_id)
        summary = group.task.group if group is not None else None
        if group is None or summary is None or "rules" not in summary:
            raise TrainingError(
                f"group {task_id} cannot be decided again: run {store.run_name} does not hold"
                + (" its Task" if group is None else " the rules that decided it"),
                hint="leave its step out (--steps)",
            )
        if group.task.pruned_at is not None:
            raise TrainingError(
                f"group {task_id} cannot be decided again: its model calls have been pruned",
                hint="keep the rules and the Records as they are, or leave its step out (--steps)",
            )
        stored = GroupRules.of_group(summary)
        # A conversation is a group of one, whatever is changed of what compares trajectories.
        kept = ALONE if group.task.epoch == CONVERSATIONS else {}
        config = replace(stored.config, **{name: v for name, v in self.rules.items() if name not in kept})
        if self.scorer is not None and config.baseline == "window":
            raise TrainingError(
                f"group {task_id} cannot be scored again by {self.scorer}: its --baseline window is a mean of"
                " the scores that it had",
                hint="add --baseline none, or keep the scores",
            )
        keeps_filter = config.group_filter == stored.config.group_filter and self.scorer is None
        rules = replace(
            stored, config=config, recorded=False, filtered=stored.filtered if keeps_filter else None
        )
        records: list[Record] = [record for record in group.records if record.id not in self.without]
        if rules.filtered is not None:
            left = {record.id for record in records}
            rules = replace(rules, filtered={id: why for id, why in rules.filtered.items() if id in left})
        if self.scorer is not None:
            name = self.scorer
            records = list(await asyncio.gather(*(self._score(group, record, name) for record in records)))
        outcome = await DECISION_THREADS.run(rules.decide, replace(group, records=records))
        scores = {record.id: record.score for record in records if record.score is not None}
        return Regrouped(outcome=outcome, scores=scores if self.scorer is not None else {})

    async def _score(self, group: StoredGroup, record: Record, scorer: str) -> Record:
        """Return the Record with its new score; one without a score stays as it is."""
        if record.score is None:
            return record
        calls = group.calls.get(record.id, ())
        context = stored_context(group.task, record, calls, self.agent_config_path)
        try:
            found = await score_context(
                scorer, replace(context, agent_score=None), self.scorer_timeout_seconds
            )
        except ScorerError as error:
            raise TrainingError(
                f"--scorer {scorer} does not score {record.id}: {error.message}", hint=error.hint
            ) from error
        return replace(record, score=found.score, score_details=found.details)


def regrouping_of(relative: Relative, usual: Regrouping | None = None) -> Regrouping:
    """Return how a what-if decides the groups of its parent; ``usual`` has the settings of scorers."""
    new = {name: values[1] for name, values in relative.changed.items()}
    return replace(
        usual or Regrouping(),
        rules={name: value for name, value in new.items() if name in GROUP_RULES},
        without=frozenset(relative.without),
        scorer=new.get(SCORER),
    )


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
        context = stored_context(group.task, record, calls, options.agent_config_path)
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


def _count(split: SplitReport, group: StoredGroup, scores: Mapping[str, NewScore], done: Rescored) -> None:
    for record in group.records:
        if record.id in scores and record.score is not None:
            split.old.append(record.score)
            split.new.append(scores[record.id].score)
            split.changed += record.score != scores[record.id].score
    split.decided_again += done.decided_again
    if done.kept_because is not None:
        split.kept[done.kept_because] = split.kept.get(done.kept_because, 0) + 1
