"""Stored training data held against what the model calls that they were made from convert to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.config.schema import GroupConfig
from agentrl.data.convert import to_training_data
from agentrl.documents.dispatch import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData

_COMPARED = (
    "input_ids", "nodes", "spans", "behavior_logprobs", "tokens", "trainable_tokens", "min_version",
    "max_version",
)  # fmt: skip
_PACKED = ("input_ids", "behavior_logprobs")


def explain_difference(
    data: DBRecordData, calls: Sequence[DispatchedSamplingTask], config: GroupConfig | None
) -> str | None:
    """The fields of ``data`` that are not what ``calls`` (by index) convert to; None where all are.

    ``config`` says which calls a group trains; None takes those that ``data`` names. Raises StoreError when
    the calls contradict one another.
    """
    if config is None:
        named = {span.call for span in data.spans}
        calls = [call if call.index in named else replace(call, status=CallStatus.FAILED) for call in calls]
        config = GroupConfig(drop_zero_advantage=False, minimal_advantage=0.0)
    expected = to_training_data(_task(data), _record(data), calls, data.advantage, config)
    if expected is None:
        return "its calls have no token to train"
    return differences(data, expected)


def differences(data: DBRecordData, expected: DBRecordData, *, also: Sequence[str] = ()) -> str | None:
    """The fields of ``data`` that differ from ``expected``; None where none does. ``also``: more fields."""
    found = [_difference(name, data, expected) for name in (*also, *_COMPARED)]
    return "; ".join(text for text in found if text) or None


def _difference(name: str, data: DBRecordData, expected: DBRecordData) -> str | None:
    wanted, found = getattr(expected, name), getattr(data, name)
    if wanted == found:
        return None
    if name in _PACKED:
        return f"{name}: {len(found)} bytes that differ from the {len(wanted)} of its calls"
    return f"{name}: {found}, from its calls {wanted}"


def _task(data: DBRecordData) -> Task:
    return Task(id=data.task, task_id="", split=data.split, epoch=0, order=0, query="")


def _record(data: DBRecordData) -> Record:
    return Record(
        id=data.record, task=data.task, traj_id=0, attempt=1, split=data.split, epoch=0, query="",
        score=data.score, turns=data.turns,
    )  # fmt: skip
