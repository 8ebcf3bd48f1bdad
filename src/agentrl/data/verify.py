"""Verify stored training data against the documents that they come from, before a step trains them.

Samplers may write Tasks, Records and training data, so the trainer compares each with the others. Data pass
if a sampler could have sampled and scored them; all other data are refused.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.config.schema import GroupConfig
from agentrl.data.convert import to_training_data
from agentrl.data.finalize_group import GroupRules
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus, TaskStatus
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import AgentRLError, StoreUnavailableError
from agentrl.store.groups import StoredGroup, slot_problem

if TYPE_CHECKING:
    from agentrl.store.client import Store

Verify = Callable[[Sequence[DBRecordData]], Awaitable[dict[str, str]]]
"""Training data → the groups that fail verification: {task: problem}."""

_TOLERANCE = 1e-9
"""Largest relative and absolute difference of two advantages that counts as rounding."""

_ORIGIN = ("record", "task", "split", "score", "advantage", "turn_advantages", "turns")
_COMPARED = (
    "input_ids", "nodes", "spans", "faulty_calls", "images", "behavior_logprobs", "tokens",
    "trainable_tokens", "min_version", "max_version",
)  # fmt: skip
_PACKED = ("input_ids", "behavior_logprobs")


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
                problem = await asyncio.to_thread(group_problem, group, items)
            except StoreUnavailableError:
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
    if not isinstance(summary.get("rules"), Mapping):
        return "its Task does not hold the rules by which it was decided"
    expected = {
        item.id: item
        for item in GroupRules.of_group(summary).decide(group.task, group.records, group.calls).data
    }
    counts = {record.id: record.trained_count for record in group.records}
    for item in data:
        if item.id not in expected:
            return f"its Records and model calls give no training data {item.id}"
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
    data: DBRecordData, calls: Sequence[DispatchedSamplingTask], config: GroupConfig | None
) -> str | None:
    """Compare ``data`` with a fresh conversion of its model calls; return the differences, or None.

    ``calls`` are ordered by index. ``config`` holds the rules for which calls are trained; with None, the
    calls that ``data`` names are. Raises StoreError if the calls contradict one another.
    """
    if config is None:
        named = {span.call for span in data.spans}
        calls = [call if call.index in named else replace(call, status=CallStatus.FAILED) for call in calls]
        config = GroupConfig(drop_zero_advantage=False, minimal_advantage=0.0)
    expected = to_training_data(
        _task(data), _record(data), calls, data.advantage, config, turn_advantages=data.turn_advantages
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


def _task(data: DBRecordData) -> Task:
    return Task(id=data.task, task_id="", split=data.split, epoch=0, order=0, query="")


def _record(data: DBRecordData) -> Record:
    return Record(
        id=data.record, task=data.task, traj_id=0, attempt=1, split=data.split, epoch=0, query="",
        score=data.score, turns=data.turns, untrained_calls=data.untrained_calls,
    )  # fmt: skip
