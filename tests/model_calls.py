"""A task, its trajectories and their model calls, for what converts, scores and checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus
from agentrl.documents.task import Task

TASK = Task(id="train/0/a", task_id="a", split="train", epoch=0, order=0, query="q")


def record(place: int = 0, score: float | None = 1.0, **changes: Any) -> Record:
    """The trajectory of ``TASK`` in this place."""
    fields: dict[str, Any] = {
        "id": f"{TASK.id}/{place}/1", "task": TASK.id, "traj_id": place, "attempt": 1, "split": "train",
        "epoch": 0, "query": "q", "score": score, "turns": 1,
    }  # fmt: skip
    return Record(**(fields | changes))


def model_call(
    record: str, index: int, parent: int | None = None, context: Sequence[int] = (),
    output: Sequence[int] = (), *, versions: Sequence[tuple[int, int, int]] | None = None, **changes: Any,
) -> DispatchedSamplingTask:  # fmt: skip
    """A call behind ``parent``; ``versions`` are (version, start, end), and id i has logprob −i/100."""
    spans = [(0, 0, len(output))] if versions is None else versions
    fields: dict[str, Any] = {
        "id": f"{record}/{index}", "record": record, "index": index,
        "parent": None if parent is None else f"{record}/{parent}", "status": CallStatus.COMPLETED,
        "messages": (), "response": {"content": "", "tool_calls": []}, "finish_reason": "stop",
        "versions": tuple(VersionSpan(version=of, start=start, end=end) for of, start, end in spans),
        "prompt_tokens": 0, "generated_tokens": len(output), "engine": "e", "generate_seconds": 0.1,
        "context_ids": pack_ids(context), "output_ids": pack_ids(output),
        "logprobs": pack_floats([-token / 100 for token in output]),
    }  # fmt: skip
    return DispatchedSamplingTask(**(fields | changes))
