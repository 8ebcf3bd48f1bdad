"""Decide a finished group and its training data; verify that stored data follow from their group.

Samplers may write Tasks, Records and training data, so the trainer compares each with the others. Data pass
if a sampler could have sampled and scored them; all other data are refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from agentrl.base.concurrency import DECISION_THREADS, time_limit
from agentrl.config.training import RIGHT_THRESHOLD, GroupConfig
from agentrl.data.trajectory_tree import masked_calls, to_training_data
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Column, Record, TokenColumns
from agentrl.documents.status import CallStatus, ColumnStatus, RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import CONVERSATIONS, Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import AgentRLError, GroupError, StoreError, StoreUnavailableError
from agentrl.scoring.groups import (
    BUILT_IN,
    Decision,
    alone,
    decide_group,
    dropped_by_filter,
    filtered_of,
    recorded_decisions,
    rules_of,
    summarize,
)
from agentrl.store.groups import GroupOutcome, RecordOutcome, StoredGroup, slot_problem

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

TRAIN_SPLIT: Final = "train"

DECIDE_SECONDS: Final = 120.0
"""Time limit of the decision on one group: a user's filter may hang."""

_LISTED: Final = 8
"""Largest number of parameters listed in a summary or a reason."""
Decide = Callable[[StoredGroup], GroupOutcome]
"""A pure function, which may run twice."""
Verify = Callable[[Sequence[DBRecordData]], Awaitable[dict[str, str]]]
"""Training data → the groups that fail verification: {task: problem}."""
_TOLERANCE = 1e-9
"""Largest relative and absolute difference of two advantages that counts as rounding."""
_ORIGIN = ("record", "task", "split", "score", "advantage", "turn_advantages", "turns")
_COMPARED = (
    "input_ids", "nodes", "spans", "faulty_calls", "images", "behavior_logprobs",
    "sampling_mask", "routing", "columns", "tokens", "trainable_tokens", "min_version", "max_version",
)  # fmt: skip
_PACKED = ("input_ids", "behavior_logprobs", "sampling_mask", "routing", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """The flags and the seed that decide a group; stored with it as ``Task.group.rules``."""

    config: GroupConfig
    seed: int
    filtered: Mapping[str, str] | None = None
    """Recorded drops of ``--group_filter``, {id: reason}. None: call the filter."""
    recorded: bool = False
    """True: take the advantages that Records hold, unless a built-in ``--advantage`` computes them again."""

    @classmethod
    def of_group(cls, group: Mapping[str, Any]) -> GroupRules:
        """Return the rules of ``Task.group`` for deciding it again without importing a user's code."""
        rules = cls.stored(group["rules"])
        return replace(rules, filtered=filtered_of(group) or {}, recorded=True)

    @classmethod
    def stored(cls, rules: Mapping[str, Any]) -> GroupRules:
        """Return the rules of a finalized group; missing flags have their defaults."""
        return cls(config=rules_of(rules), seed=int(rules.get("seed", 0)))

    def to_store(self) -> dict[str, Any]:
        """Return the rules as stored in ``Task.group.rules``."""
        return {**asdict(self.config), "seed": self.seed}

    def decide(self, group: StoredGroup) -> GroupOutcome:
        """Decide a group. Deterministic: every process computes the same outcome.

        A group filter may not be deterministic, so its drops are stored (``Task.group.filtered``). Groups of
        ``TRAIN_SPLIT`` become training data; groups of other splits are only summarized.
        """
        task, scored = group.task, [record for record in group.records if record.score is not None]
        failed = sum(slot.status is SlotStatus.FAILED for slot in task.slots)
        rules = self.to_store()
        if task.split != TRAIN_SPLIT:
            outcomes = [RecordOutcome(record_id=record.id, status=RecordStatus.READY) for record in scored]
            summed = {**summarize(scored, failed, 0, rules), "right_threshold": self.config.right_threshold}
            return GroupOutcome(records=tuple(outcomes), summary=summed)
        filtered = self._filtered(task, scored)
        by_id = {record.id: record for record in scored}
        converted = [
            self._convert(group, by_id[decision.record_id], decision)
            for decision in self._decisions(task, scored, filtered)
        ]
        data = tuple(each.data for each in converted if each.data is not None)
        masked = Counter(what for each in converted for what in each.masked)
        summary = {
            **summarize(scored, failed, len(data), rules),
            "masked_calls": [
                {"because": what, "calls": count} for what, count in masked.most_common(_LISTED)
            ],
            "filtered": [{"record": key, "because": because} for key, because in filtered.items()],
            "rules": rules,
        }
        return GroupOutcome(data=data, records=tuple(each.outcome for each in converted), summary=summary)

    def _filtered(self, task: Task, scored: Sequence[Record]) -> Mapping[str, str]:
        """Return the Records that ``--group_filter`` drops, and why."""
        if self.filtered is None and self.config.group_filter is not None and scored:
            return dropped_by_filter(self.config.group_filter, task, scored)
        return self.filtered or {}

    def _decisions(
        self, task: Task, scored: Sequence[Record], filtered: Mapping[str, str]
    ) -> Sequence[Decision]:
        if self.recorded and self.config.advantage not in BUILT_IN:
            return recorded_decisions(scored)
        # Seed by the task: the trainer decides the group again, and must draw the same.
        return decide_group(scored, self.config, random.Random(f"{self.seed}/{task.id}"), filtered)

    def _convert(self, group: StoredGroup, record: Record, decision: Decision) -> _Converted:
        """Return the training data of a Record, or why there are none."""
        advantage, turn_advantages = decision.advantage, decision.turn_advantages
        if advantage is None:
            return _abandoned(record, decision.abandoned_because or "abandoned")
        calls, columns = group.calls.get(record.id, ()), group.columns.get(record.id, ())
        chosen = [call for call in calls if call.index not in record.untrained_calls]
        masked = masked_calls(chosen, advantage, self.config, turn_advantages)
        if (missing := _missing_column(columns, self.config.column_names)) is not None:
            return _abandoned(record, missing, masked)
        try:
            data = to_training_data(
                group.task, record, calls, advantage, self.config, turn_advantages=turn_advantages,
                columns=columns,
            )  # fmt: skip
        except StoreError as error:
            logger.error("a trajectory cannot be trained", extra={"record": record.id, "why": error.message})
            return _abandoned(record, error.message, masked)
        if data is not None:
            ready = RecordOutcome(
                record_id=record.id, status=RecordStatus.READY, advantage=advantage,
                turn_advantages=turn_advantages,
            )  # fmt: skip
            return _Converted(ready, masked, data)
        why = "no model call has an advantage to train with"
        if advantage == 0 and self.config.drop_zero_advantage:
            why = "its advantage is 0, and drop_zero_advantage leaves it out"
        elif masked:
            why = f"no model call to train: {_listed(masked)}, which the engine's logprobs leave out"
        return _abandoned(record, why, masked)


async def finalize_group(
    store: Store, task_id: str, rules: GroupRules, columns: Sequence[str] = ()
) -> GroupOutcome | None:
    """Read a group, decide it by ``rules`` in a thread and store the outcome, which is returned.

    None if it is not waiting, if it waits for one of ``columns``, or if another process finalized it first.
    Nothing is written if the decision raises. Raises GroupError after ``DECIDE_SECONDS``; the thread goes on.
    """
    group = await store.groups.to_decide(task_id, columns)
    if group is None:
        return None
    if group.task.epoch == CONVERSATIONS:
        rules = replace(rules, config=alone(rules.config))
    outcome: GroupOutcome
    try:
        # Decide in a thread: it converts a whole group, and calls users' filters and estimators.
        async with time_limit(DECIDE_SECONDS):
            outcome = await DECISION_THREADS.run(rules.decide, group)
    except TimeoutError as error:
        raise GroupError(
            f"the decision on group {task_id} took longer than {DECIDE_SECONDS:g} s",
            hint="make sure that the --group_filter returns; it must not wait for anything",
        ) from error
    return outcome if await store.groups.finalize(group, outcome) else None


@dataclass(frozen=True, slots=True)
class _Converted:
    """What became of a Record, its training data, and why sampling parameters mask some of its calls."""

    outcome: RecordOutcome
    masked: Sequence[str]
    data: DBRecordData | None = None


def _abandoned(record: Record, because: str, masked: Sequence[str] = ()) -> _Converted:
    return _Converted(
        RecordOutcome(record_id=record.id, status=RecordStatus.ABANDONED, because=because), masked
    )


def decide_stored(task: Task) -> Decide | None:
    """Return the function that decides a finalized group by the rules that it stores; None without any."""
    group = task.group or {}
    if group.get("rules") is not None:
        return GroupRules.stored(group["rules"]).decide
    if task.split != TRAIN_SPLIT:
        right = float(group.get("right_threshold", RIGHT_THRESHOLD))
        return GroupRules(config=GroupConfig(right_threshold=right), seed=0).decide
    return None


def _missing_column(columns: Sequence[Column], names: Sequence[str]) -> str | None:
    """Return why a Record lacks a column that its group's rules name; None if it has all."""
    stored = {column.name: column for column in columns}
    for name in names:
        column = stored.get(name)
        if column is None or column.status is not ColumnStatus.FILLED:
            why = "it was never opened" if column is None else column.problem or f"it is {column.status}"
            return f"its column {name} was given up: {why}"
    return None


def _listed(reasons: Sequence[str]) -> str:
    counts = Counter(reasons)
    listed = [f"{count} sampled with {what}" for what, count in counts.most_common(_LISTED)]
    rest = counts.total() - sum(count for _, count in counts.most_common(_LISTED))
    return ", ".join([*listed, f"{rest} with others"] if rest else listed)


def verifier(store: Store) -> Verify:
    """Return a check of training data against the other documents of ``store``."""

    async def verify(data: Sequence[DBRecordData]) -> dict[str, str]:
        by_task: dict[str, list[DBRecordData]] = {}
        for item in data:
            by_task.setdefault(item.task, []).append(item)
        problems: dict[str, str] = {}
        for task_id, items in by_task.items():
            try:
                group = await store.groups.stored(task_id)
                # Decide in a thread: it converts a whole group, and the loop renews the lease meanwhile.
                problem = await asyncio.to_thread(group_problem, group, items)
            except StoreUnavailableError:
                # Raise an outage: a group that cannot be read now is not wrong, and a quarantine is final.
                raise
            except (AgentRLError, ValueError, TypeError, KeyError) as error:
                problem = f"it cannot be checked: {error}"
            if problem is not None:
                problems[task_id] = problem
        return problems

    return verify


def group_problem(group: StoredGroup | None, data: Sequence[DBRecordData]) -> str | None:
    """Return why ``data`` do not follow from their group; None if they do."""
    if group is None:
        return "it has no Task"
    if group.task.status is not TaskStatus.COMPLETED:
        return f"its Task is {group.task.status}, not {TaskStatus.COMPLETED}"
    problem = slot_problem(group.task, group.records)
    if problem is not None:
        return problem
    summary = group.task.group or {}
    if summary.get("kept_as_trained"):
        return "trajectories of it were withdrawn after a step trained it (agentrl retract --rebuild)"
    if not isinstance(summary.get("rules"), Mapping):
        return "its Task does not hold the rules by which it was decided"
    expected = {item.id: item for item in GroupRules.of_group(summary).decide(group).data}
    counts = {record.id: record.trained_count for record in group.records}
    for item in data:
        if item.id not in expected:
            return f"its Records and model calls give no training data {item.id}"
        # Compare the counts: lowered in the data, they would let a step train them more than allowed.
        if item.trained_count != counts[item.id]:
            return f"{item.id}: trained_count: {item.trained_count}, of its Record {counts[item.id]}"
        if (problem := differences(item, _rounded_as(item, expected[item.id]), also=_ORIGIN)) is not None:
            return f"{item.id}: {problem}"
    return None


def _rounded_as(data: DBRecordData, expected: DBRecordData) -> DBRecordData:
    """Return ``expected`` with the advantages of ``data`` if they differ only by rounding."""
    found, wanted = _all_advantages(data), _all_advantages(expected)
    if len(data.spans) != len(expected.spans) or len(found) != len(wanted):
        return expected
    pairs = zip(found, wanted, strict=True)
    if not all(math.isclose(*pair, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) for pair in pairs):
        return expected
    spans = (
        replace(span, advantage=own.advantage) for span, own in zip(expected.spans, data.spans, strict=True)
    )
    return replace(
        expected, advantage=data.advantage, turn_advantages=data.turn_advantages, spans=tuple(spans)
    )


def _all_advantages(data: DBRecordData) -> list[float]:
    return [data.advantage, *data.turn_advantages, *(span.advantage for span in data.spans)]


def explain_difference(
    data: DBRecordData, calls: Sequence[DispatchedSamplingTask], config: GroupConfig | None,
    columns: Sequence[Column] = (),
) -> str | None:  # fmt: skip
    """Compare ``data`` with a fresh conversion of its model calls; return the differences, or None.

    ``calls`` are ordered by index. ``config`` holds the rules for which calls are trained; with None, the
    calls that ``data`` names are. Raises StoreError if the calls contradict one another.
    """
    if config is None:
        named = {span.call for span in data.spans}
        # Call failed what the data do not name: a conversion keeps failed calls as context.
        calls = [call if call.index in named else replace(call, status=CallStatus.FAILED) for call in calls]
        stored = TokenColumns.unpack(data.columns, data.trainable_tokens)
        names = ",".join(() if stored is None else stored.values)
        config = GroupConfig(drop_zero_advantage=False, minimal_advantage=0.0, columns=names)
    task = Task(id=data.task, task_id="", split=data.split, epoch=0, order=0, query="")
    record = Record(
        id=data.record, task=data.task, traj_id=0, attempt=1, split=data.split, epoch=0, query="",
        score=data.score, turns=data.turns, untrained_calls=data.untrained_calls,
    )  # fmt: skip
    expected = to_training_data(
        task, record, calls, data.advantage, config, turn_advantages=data.turn_advantages, columns=columns
    )
    if expected is None:
        return "its model calls have no token to train"
    return differences(data, expected)


def differences(data: DBRecordData, expected: DBRecordData, *, also: Sequence[str] = ()) -> str | None:
    """Return the fields of ``data`` that differ from ``expected``, or None. ``also``: more fields."""
    found = [_difference(name, data, expected) for name in (*also, *_COMPARED)]
    return "; ".join(text for text in found if text) or None


def _difference(name: str, data: DBRecordData, expected: DBRecordData) -> str | None:
    wanted, found = getattr(expected, name), getattr(data, name)
    if wanted == found:
        return None
    if name in _PACKED:
        return f"{name}: {len(found)} bytes that differ from the {len(wanted)} of its model calls"
    return f"{name}: {found}, from its model calls {wanted}"
