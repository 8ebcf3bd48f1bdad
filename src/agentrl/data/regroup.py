"""Decide a stored group again: by other rules, with other scores or without some Records; write nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentrl.config.whatif import GROUP_RULES
from agentrl.data.finalize_group import GroupRules
from agentrl.data.rescore import scorer_context
from agentrl.documents.family import Relative
from agentrl.documents.record import Record
from agentrl.documents.task import record_task
from agentrl.errors import ScorerError, TrainingError
from agentrl.scoring.scorers import score_context
from agentrl.store.groups import GroupOutcome, StoredGroup
from agentrl.threads import DECISION_THREADS

if TYPE_CHECKING:
    from agentrl.store.client import Store

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
        config = replace(stored.config, **self.rules)
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
        context = scorer_context(group.task, record, calls, self.agent_config_path)
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
