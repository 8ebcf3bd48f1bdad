"""A hand-made trajectory of two turns, and a snapshot of a healthy run, for the tests of screens."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from made_documents import made_call
from rich.console import Console, RenderableType

from agentrl.documents.document import now
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ToolExecution,
    VersionSpan,
    pack_floats,
)
from agentrl.documents.record import Record
from agentrl.documents.run import InferenceService, SamplerProcess, TrainerLease
from agentrl.documents.status import RecordStatus, ServiceStatus, StepStatus, StopReason
from agentrl.screens.snapshot import RunSnapshot
from agentrl.screens.views.counts import Continued, Rates
from agentrl.screens.views.pipelines import EngineRow, StepRow, TrajectoryRow
from agentrl.store.run_list import Disk
from agentrl.store.services import ListedSampler, Liveness

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
RECORD_ID = "train/0/task_001/3/1"


def record(**changes: Any) -> Record:
    """A scored trajectory that was trained."""
    fields: dict[str, Any] = {
        "id": RECORD_ID, "task": "train/0/task_001", "traj_id": 3, "attempt": 1, "split": "train", "epoch": 0,
        "status": RecordStatus.READY, "query": "What is 17 * 23?", "answer": "391", "final_answer": "391",
        "score": 1.0, "score_details": {"verdict": "equal"}, "stop_reason": StopReason.ANSWERED,
        "advantage": 0.5, "turns": 2, "tool_calls": 1, "prompt_tokens": 140, "generated_tokens": 42,
        "min_version": 4, "max_version": 5, "owner": "node-7", "trained_count": 1, "last_trained_step": 6,
        "traj": (f"{RECORD_ID}/0", f"{RECORD_ID}/1"), "created_at": NOW,
        "completed_at": NOW + timedelta(seconds=2.5), "scored_at": NOW + timedelta(seconds=3.25),
    }  # fmt: skip
    return Record(**(fields | changes))


def call(index: int, **changes: Any) -> DispatchedSamplingTask:
    """One model call without tools."""
    fields: dict[str, Any] = {
        "parent": f"{RECORD_ID}/{index - 1}" if index else None, "response": {"content": "thinking"},
        "versions": (VersionSpan(version=4, start=0, end=20),), "prompt_tokens": 100, "generated_tokens": 20,
        "engine": "http://127.0.0.1:1", "generate_seconds": 1.25,
    }  # fmt: skip
    return replace(made_call(RECORD_ID, index, context=(), output=()), **(fields | changes))


def two_turns() -> list[DispatchedSamplingTask]:
    """The model calls the calculator, reads its result, and answers."""
    arguments = {"expression": "17 * 23"}
    system = {"role": "system", "content": "You may calculate."}
    question = {"role": "user", "content": "What is 17 * 23?"}
    asks = {"function": {"name": "calculate", "arguments": arguments}}
    execution = ToolExecution(
        name="calculate", arguments=arguments, result="391", error=False, seconds=0.0123, server="calc"
    )
    first = call(
        0, tool_seconds=0.02, messages=(system, question), tool_executions=(execution,),
        response={"content": "I use the tool.", "tool_calls": [asks]},
    )  # fmt: skip
    second = call(
        1, messages=({"role": "tool", "content": "391"},), response={"content": "<answer>391</answer>"},
        versions=(VersionSpan(version=4, start=0, end=5), VersionSpan(version=5, start=5, end=22)),
    )  # fmt: skip
    return [first, second]


def row(**changes: Any) -> TrajectoryRow:
    """The row of the trajectory of ``record`` in ``audit_trajectories``."""
    return replace(TrajectoryRow.from_document(record().to_document()), **changes)


def step_row(number: int, **changes: Any) -> StepRow:
    """The row of a committed optimizer step in ``audit_steps``."""
    fields: dict[str, Any] = {
        "id": f"a/{number}", "step": number, "status": StepStatus.COMMITTED, "policy_version": number - 1,
        "trajectories": 0, "groups": 0, "owner": "trainer", "planned_at": NOW, "committed_at": NOW,
        "metrics": {"reward": number / 10, "staleness_mean": 0.5, "staleness_max": 1.0},
    }  # fmt: skip
    return StepRow(**(fields | changes))


GOOD = {"reward": 0.5, "kl_k3": 0.001, "entropy": 0.5, "effective_sample_size": 0.98, "masked_fraction": 0.01,
        "abandoned_groups": 0.3, "grad_norm": 0.4, "loss": 0.0}  # fmt: skip


def steps(count: int = 20, **last: float) -> list[StepRow]:
    """Steps of ten seconds each, the last of them now; ``last`` changes the metrics of the last five."""
    return [
        step_row(
            number, committed_at=NOW - timedelta(seconds=10 * (count - number)),
            metrics={**GOOD, "reward": 0.3 + 0.01 * number, **(last if number > count - 5 else {})},
        )
        for number in range(1, count + 1)
    ]  # fmt: skip


def engine(age: float = 1.0, name: str = "e") -> InferenceService:
    """A ready engine whose last heartbeat is ``age`` seconds old."""
    return InferenceService(
        id=name, url=f"http://{name}", engine="local", model="m", status=ServiceStatus.READY, host="h", pid=1,
        heartbeat=NOW - timedelta(seconds=age),
    )  # fmt: skip


def sampler(name: str, silent: float = 1.0, **changes: Any) -> ListedSampler:
    """A sampler whose last heartbeat is ``silent`` seconds old."""
    process = SamplerProcess(id=name, host="h", pid=1, started_at=NOW, heartbeat=NOW)
    return ListedSampler(process=replace(process, **changes), claims=0, silent_seconds=silent)


def snapshot(**changes: Any) -> RunSnapshot:
    """A run with a trainer, a sampler and an engine; ``liveness`` changes fields of its liveness."""
    liveness = Liveness(
        at=NOW, claims={"s": 4}, listed=(sampler("s"),), last_claim=NOW, engines=(engine(),), outages=(),
        waiting_for_score=0, alive_seconds=10.0,
    )  # fmt: skip
    liveness = replace(liveness, **changes.pop("liveness", {}))
    healthy = RunSnapshot(
        run_name="demo", liveness=liveness,
        lease=TrainerLease(owner="t", lease_expires_at=NOW + timedelta(seconds=30)), steps=steps(),
        planned=None, tasks={("train", 0): {"completed": 5, "running": 3}},
        records={"train": {"ready": 100}}, data={"train": {"trained": 100}}, quarantined_because=None,
        failures=(), rates=Rates(seconds=300.0), continued=Continued(),
        engines=[EngineRow.from_document(item.to_document()) for item in liveness.engines],
        versions=(), past_outages=(),
        evaluations=(), settings=(), configurations=(), disk=Disk(),
    )  # fmt: skip
    return replace(healthy, **changes)


def printed(page: RenderableType, width: int = 160) -> str:
    """The page on a terminal of ``width`` columns, without spaces at the ends of lines."""
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False, emoji=False).print(page)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def rows(page: str, first: str) -> list[list[str]]:
    """The words of each line that begins with ``first``."""
    return [line.split() for line in page.splitlines() if line.strip().startswith(first)]


SHORT_RECORD = Record(
    id="r", task="t", traj_id=0, attempt=1, split="train", epoch=0, query="2 + 2?", created_at=now()
)


def short_call(
    index: int, parent: int | None, said: str = "!", tools: bool = False
) -> DispatchedSamplingTask:
    """A model call of three tokens of ``SHORT_RECORD``."""
    executions = (ToolExecution(name="add", arguments={"a": 2}, result="4", error=False, seconds=0.5),)
    result = ({"role": "tool", "execution": 0},)
    return made_call(
        "r", index, parent=parent, context=[1], output=[7, 8, 9], logprobs=pack_floats([0.0, -3.0, -60.0]),
        messages=({"role": "user", "content": "2 + 2?"},) if index != 1 else result,
        response={"content": said, "reasoning_content": "I think"},
        versions=(VersionSpan(version=1, start=0, end=2), VersionSpan(version=2, start=2, end=3)),
        tool_executions=executions if tools else (), tool_seconds=0.5 if tools else 0.0, generate_seconds=2.0,
        created_at=SHORT_RECORD.created_at + timedelta(seconds=3 * (index + 1)),
    )  # fmt: skip
