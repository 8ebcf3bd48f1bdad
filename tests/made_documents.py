"""Made-up tasks, records and model calls: what a test does not say is as in a plain finished trajectory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus, SlotStatus, TaskStatus
from agentrl.documents.task import Slot, Task
from agentrl.store.groups import GroupOutcome, StoredGroup


def made_task(name: str = "a", **fields: Any) -> Task:
    """A task of training."""
    values: dict[str, Any] = {"id": f"train/0/{name}", "task_id": name, "query": "q", **fields}
    return Task(**{"split": "train", "epoch": 0, "order": 0, **values})


def open_task(name: str = "a", generations: int = 1, **fields: Any) -> Task:
    """A task of training whose slots nobody has claimed."""
    return made_task(name, slots=tuple(Slot(traj_id=traj) for traj in range(generations)), **fields)


def made_record(task: Task, place: int, score: float | None, **fields: Any) -> Record:
    """The first attempt of the trajectory at ``place`` in the group of a task."""
    return Record(
        id=f"{task.id}/{place}/1", task=task.id, traj_id=place, attempt=1, split=task.split, epoch=task.epoch,
        query=task.query, score=score, **fields,
    )  # fmt: skip


def made_call(
    record: str,
    index: int,
    *,
    parent: int | None = None,
    context: Sequence[int] = (1, 2),
    output: Sequence[int] = (3,),
    **fields: Any,
) -> DispatchedSamplingTask:
    """A model call that continues the call ``parent``; version 0 sampled its ``output``."""
    values: dict[str, Any] = {
        "id": f"{record}/{index}", "parent": None if parent is None else f"{record}/{parent}",
        "status": CallStatus.COMPLETED, "messages": (), "response": {"content": ""}, "finish_reason": "stop",
        "versions": (VersionSpan(version=0, start=0, end=len(output)),) if output else (),
        "prompt_tokens": len(context), "generated_tokens": len(output), "generate_seconds": 0.1,
        "engine": "e", "context_ids": pack_ids(context), "output_ids": pack_ids(output),
        "logprobs": pack_floats([-0.5] * len(output)),
    }  # fmt: skip
    return DispatchedSamplingTask(record=record, index=index, **{**values, **fields})


def trained_group(
    task: Task,
    records: Sequence[Record],
    calls: Mapping[str, Sequence[DispatchedSamplingTask]],
    outcome: GroupOutcome,
) -> StoredGroup:
    """The group as it is stored once ``outcome`` is decided."""
    slots = tuple(
        Slot(traj_id=item.traj_id, status=SlotStatus.SCORED, score=item.score, record_id=item.id)
        for item in records
    )
    done = dataclasses.replace(task, status=TaskStatus.COMPLETED, slots=slots, group=outcome.summary)
    return StoredGroup(task=done, records=tuple(records), calls=calls)
