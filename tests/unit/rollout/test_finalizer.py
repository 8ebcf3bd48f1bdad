"""Test what finalizing a group logs and writes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.config.schema import GroupConfig
from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus
from agentrl.documents.task import Task
from agentrl.rollout.finalizer import GroupFinalizer
from agentrl.store.client import Store
from agentrl.store.groups import StoredGroup


def group(name: str, params: dict[str, Any]) -> StoredGroup:
    """A right and a wrong trajectory of one call each."""
    task = Task(id=name, task_id=name, split="train", epoch=0, order=0, query="q")
    records = [
        Record(
            id=f"{name}/{traj}/1", task=name, traj_id=traj, attempt=1, split="train", epoch=0, query="q",
            score=float(traj), turns=1,
        )
        for traj in (0, 1)
    ]  # fmt: skip
    calls = [
        DispatchedSamplingTask(
            id=f"{record.id}/0", record=record.id, index=0, parent=None, status=CallStatus.COMPLETED,
            messages=(), response={}, finish_reason="stop",
            versions=(VersionSpan(version=0, start=0, end=1),), prompt_tokens=1, generated_tokens=1,
            engine="e", sampling_params=params, generate_seconds=0.1, context_ids=pack_ids([1]),
            output_ids=pack_ids([2]), logprobs=pack_floats([-1.0]),
        )
        for record in records
    ]  # fmt: skip
    return StoredGroup(task=task, records=records, calls={call.record: [call] for call in calls})


class Groups:
    """Decides the groups that it was given, and keeps their summaries."""

    def __init__(self, groups: Sequence[StoredGroup]) -> None:
        self.groups = {group.task.id: group for group in groups}
        self.summaries: dict[str, Any] = {}

    async def finalize(self, task_id: str, decide: Any, columns: Any) -> bool:
        """As the store's."""
        self.summaries[task_id] = decide(self.groups[task_id]).summary
        return True


async def test_a_parameter_that_masks_calls_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    penalized = {"temperature": 0.5, "presence_penalty": 1.5}
    groups = Groups(
        [
            group("a", {"temperature": 0.5}),
            group("b", penalized),
            group("c", penalized),
            group("d", {"top_p": 0.9}),
        ]
    )
    finalizer = GroupFinalizer(
        cast("Store", SimpleNamespace(groups=groups)), GroupConfig(), split="train", seed=0
    )
    with caplog.at_level(logging.WARNING):
        for name in "abcd":
            assert await finalizer.finalize(name)
    masked = [summary["masked_calls"] for summary in groups.summaries.values()]
    assert masked == [
        [],
        [{"because": "presence_penalty 1.5", "calls": 2}],
        [{"because": "presence_penalty 1.5", "calls": 2}],
        [{"because": "top_p 0.9", "calls": 2}],
    ]
    assert [record.getMessage().partition(" are recorded")[0] for record in caplog.records] == [
        "model calls sampled with presence_penalty 1.5", "model calls sampled with top_p 0.9",
    ]  # fmt: skip
