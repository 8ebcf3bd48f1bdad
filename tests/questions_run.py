"""A run of two epochs in which each question of docs/auditing.md has an answer, made through the store."""

from __future__ import annotations

from pathlib import Path

from ready_data import ready_data
from small_run import LEASE, fail, publish

from agentrl.config.schema import GroupConfig
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ToolExecution,
    VersionSpan,
    pack_floats,
    pack_ids,
)
from agentrl.documents.record import Failure
from agentrl.documents.run import InferenceService
from agentrl.documents.status import CallStatus, RecordStatus, ServiceStatus, StopReason
from agentrl.documents.task import Claim, Slot, Task, task_key
from agentrl.documents.training import TrainStep
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store

FAST, SLOW = "http://fast:1", "http://slow:2"
CALCULATOR = ToolExecution(
    name="calculate", arguments={"expression": "2 + 2"}, result="4", error=False, seconds=0.1,
    server="calculator",
)  # fmt: skip
SEARCH = ToolExecution(
    name="search", arguments={"query": "2 + 2"}, result="timed out", error=True, seconds=4.0, server="web"
)


async def build(store: Store, weights: Path) -> None:
    """Two epochs of tasks, two steps, three policy versions and three engines."""
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    await publish(store, weights, 0, step=0, train_step=None)
    await _first_epoch(store)
    assert await finalizer.run_waiting() == 3
    await _step(store, weights, 1)
    await _second_epoch(store)
    assert await finalizer.run_waiting() == 3
    await _step(store, weights, 2)
    await _begin(store, 1, "task_004", 3)
    await _score(store, 1.0, (1,))
    await _score(store, 0.0, (1,))
    assert await finalizer.run_waiting() == 1
    await _engines(store)


async def _first_epoch(store: Store) -> None:
    await _begin(store, 0, "task_001", 0)
    await _score(store, 1.0, (0, 0), tool=CALCULATOR)
    claim = await _claim(store)
    failure = Failure(kind="tool", message="search: connection refused")
    await store.attempts.fail(claim, failure, max_attempts=3, backoff_seconds=0.0)
    await _score(store, 0.0, (0,))
    await _begin(store, 0, "task_002", 1)
    for _ in range(2):
        await _score(store, 1.0, (0, 0), tool=CALCULATOR)
    await _begin(store, 0, "task_003", 2)
    for _ in range(2):
        await _score(store, 0.0, (0, 0), tool=SEARCH)


async def _second_epoch(store: Store) -> None:
    await _begin(store, 1, "task_001", 0)
    for _ in range(2):
        await _score(store, 1.0, (1,))
    await _begin(store, 1, "task_002", 1)
    await _score(store, 1.0, (0, 1), engine=SLOW)
    await _score(store, 0.0, (1,))
    await _begin(store, 1, "task_003", 2)
    await fail(store, await _claim(store), max_attempts=1)
    await _score(store, 0.0, (1,))


async def _begin(store: Store, epoch: int, name: str, order: int) -> None:
    slots = tuple(Slot(traj_id=traj) for traj in range(2))
    task = Task(
        id=task_key("train", epoch, name), task_id=name, split="train", epoch=epoch, order=order,
        query="What is 2 + 2?", answer="4", slots=slots,
    )  # fmt: skip
    await store.tasks.load([task])


async def _claim(store: Store) -> Claim:
    claim = await store.claims.claim(split="train", owner="sampler", lease_seconds=LEASE)
    assert claim is not None
    await store.records.create(claim)
    await store.records.advance(claim, RecordStatus.RUNNING)
    return claim


async def _score(
    store: Store, value: float, versions: tuple[int, ...], *, tool: ToolExecution | None = None,
    engine: str = FAST,
) -> None:  # fmt: skip
    """One trajectory with a call for each of ``versions``; ``tool`` runs after the first of several."""
    claim = await _claim(store)
    for index, version in enumerate(versions):
        runs = tool if index + 1 < len(versions) else None
        await store.model_calls.add(claim, _call(claim, index, version, runs, tool is not None, engine))
    answer = "4" if value else "5"
    await store.records.advance(
        claim, RecordStatus.COMPLETED, final_answer=answer, stop_reason=StopReason.ANSWERED
    )
    await store.records.advance(claim, RecordStatus.SCORING)
    await store.attempts.score(claim, value, {"scorer": "exact"})


def _call(
    claim: Claim, index: int, version: int, tool: ToolExecution | None, answered: bool, engine: str
) -> DispatchedSamplingTask:
    question = {"role": "user", "content": "What is 2 + 2?"}
    more = {"role": "user", "content": "Go on."}
    read = ({"role": "tool", "execution": 0} if answered else more) if index else question
    said = "<answer>4</answer>" if index else "Let me see."
    return DispatchedSamplingTask(
        id=f"{claim.record_id}/{index}", record=claim.record_id, index=index,
        parent=f"{claim.record_id}/{index - 1}" if index else None,
        status=CallStatus.TOOL_FAILED if tool is not None and tool.error else CallStatus.COMPLETED,
        messages=(read,), response={"role": "assistant", "content": said},
        tool_executions=() if tool is None else (tool,), finish_reason="stop",
        versions=(VersionSpan(version=version, start=0, end=4),), prompt_tokens=2 + 6 * index,
        generated_tokens=4, engine=engine, generate_seconds=2.0 if engine == SLOW else 0.5,
        tool_seconds=0.0 if tool is None else tool.seconds, context_ids=pack_ids([10 + index, 20]),
        output_ids=pack_ids([claim.traj_id, 1, 2, 3]), logprobs=pack_floats([-0.5] * 4),
    )  # fmt: skip


async def _step(store: Store, weights: Path, step: int) -> None:
    """Train all that is ready and publish the version that comes of it."""
    key = f"1/{step}"
    data = tuple(meta.id for meta in await ready_data(store, "train"))
    await store.steps.plan(TrainStep(id=key, step=step, policy_version=step - 1, data=data, owner="trainer"))
    metrics = {"loss": 0.1, "reward": 0.5, "staleness_mean": 0.25, "staleness_max": 1.0}
    await store.steps.commit(key, metrics, data)
    await publish(store, weights, step, step=step, train_step=key)


async def _engines(store: Store) -> None:
    served = ((FAST, 2, ServiceStatus.READY), (SLOW, 1, ServiceStatus.READY))
    stopped = ("http://gone:3", 0, ServiceStatus.STOPPED)
    for url, version, status in (*served, stopped):
        service = InferenceService(
            id=url, url=url, engine="local", model="tiny", host="here", pid=1, status=status,
            policy_version=version,
        )  # fmt: skip
        await store.services.register(service)
