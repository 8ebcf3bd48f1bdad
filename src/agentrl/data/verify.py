"""Proves training data before a step trains them: scores, advantages and tokens follow from what is stored.

Samplers may write Tasks, Records and training data, so each is compared with the others here. What a
sampler could have sampled and scored by itself passes; everything else does not.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.data.compare import differences
from agentrl.data.finalize_group import GroupRules
from agentrl.documents.status import TaskStatus
from agentrl.documents.training import DBRecordData
from agentrl.errors import AgentRLError, StoreUnavailableError
from agentrl.store.groups import StoredGroup, slot_problem

if TYPE_CHECKING:
    from agentrl.store.client import Store

Verify = Callable[[Sequence[DBRecordData]], Awaitable[dict[str, str]]]
"""Training data → the groups among them that are not proven, and why: {task: problem}."""

_TOLERANCE = 1e-9
_ORIGIN = ("record", "task", "split", "score", "advantage", "turns")


def verifier(store: Store) -> Verify:
    """Return the check of training data against the other documents of ``store``."""

    async def verify(data: Sequence[DBRecordData]) -> dict[str, str]:
        by_task: dict[str, list[DBRecordData]] = {}
        for item in data:
            by_task.setdefault(item.task, []).append(item)
        problems: dict[str, str] = {}
        for task_id, items in by_task.items():
            try:
                group = await store.training.stored_group(task_id)
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
    """Say why ``data`` do not follow from their group; None where they do."""
    if group is None:
        return "it has no Task"
    if group.task.status is not TaskStatus.COMPLETED:
        return f"its Task is {group.task.status}, not {TaskStatus.COMPLETED}"
    problem = slot_problem(group.task, group.records)
    if problem is not None:
        return problem
    summary = group.task.group or {}
    if not isinstance(summary.get("rules"), Mapping):
        return "its Task does not say by which rules it was decided"
    expected = {
        item.id: item
        for item in GroupRules.of_group(summary).decide(group.task, group.records, group.calls).data
    }
    for item in data:
        if item.id not in expected:
            return f"its Records and model calls give no training data {item.id}"
        if (problem := differences(item, _rounded_as(item, expected[item.id]), also=_ORIGIN)) is not None:
            return f"{item.id}: {problem}"
    return None


def _rounded_as(data: DBRecordData, expected: DBRecordData) -> DBRecordData:
    """``expected`` with the advantages of ``data`` where they differ by rounding on another machine only."""
    found = [data.advantage, *(span.advantage for span in data.spans)]
    wanted = [expected.advantage, *(span.advantage for span in expected.spans)]
    if len(found) != len(wanted) or not all(map(_is_close, found, wanted)):
        return expected
    spans = (replace(span, advantage=value) for span, value in zip(expected.spans, found[1:], strict=True))
    return replace(expected, advantage=data.advantage, spans=tuple(spans))


def _is_close(found: float, wanted: float) -> bool:
    return math.isclose(found, wanted, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
