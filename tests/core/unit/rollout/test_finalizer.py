"""Test what finalizing a group logs and writes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_documents import made_call, made_record, made_task

from agentrl.config.schema import GroupConfig
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store
from agentrl.store.groups import GroupOutcome, StoredGroup


def group(name: str, params: dict[str, Any]) -> StoredGroup:
    """A right and a wrong trajectory of one call each."""
    task = made_task(name, id=name)
    records = [made_record(task, place, float(place), turns=1) for place in (0, 1)]
    calls = {record.id: [made_call(record.id, 0, sampling_params=params)] for record in records}
    return StoredGroup(task=task, records=records, calls=calls)


class Groups:
    """Decides the groups that it was given, and keeps their summaries."""

    def __init__(self, groups: Sequence[StoredGroup]) -> None:
        self.groups = {group.task.id: group for group in groups}
        self.summaries: dict[str, Any] = {}

    async def to_decide(self, task_id: str, columns: Any) -> StoredGroup:
        """As the store's."""
        return self.groups[task_id]

    async def finalize(self, group: StoredGroup, outcome: GroupOutcome) -> bool:
        """As the store's."""
        self.summaries[group.task.id] = outcome.summary
        return True


async def test_a_parameter_that_masks_calls_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    penalized = {"temperature": 0.5, "presence_penalty": 1.5}
    params = {"a": {"temperature": 0.5}, "b": penalized, "c": penalized, "d": {"top_p": 0.9}}
    groups = Groups([group(*item) for item in params.items()])
    store = cast("Store", SimpleNamespace(groups=groups))
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    with caplog.at_level(logging.WARNING):
        for name in "abcd":
            assert await finalizer.finalize(name)
    masked = [summary["masked_calls"] for summary in groups.summaries.values()]
    reasons = ("presence_penalty 1.5", "presence_penalty 1.5", "top_p 0.9")
    assert masked == [[], *([{"because": reason, "calls": 2}] for reason in reasons)]
    assert [record.getMessage().partition(" are recorded")[0] for record in caplog.records] == [
        "model calls sampled with presence_penalty 1.5", "model calls sampled with top_p 0.9",
    ]  # fmt: skip
