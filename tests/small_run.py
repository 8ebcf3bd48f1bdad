"""A small run made through the store as samplers and a trainer make one, with every invariant kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from ready_data import ready_data

from agentrl.config.schema import GroupConfig
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ToolExecution,
    VersionSpan,
    pack_floats,
    pack_ids,
    pack_routing,
)
from agentrl.documents.record import Failure
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import CallStatus, RecordStatus, StopReason
from agentrl.documents.task import Claim, Slot, Task, task_key
from agentrl.documents.training import STATE, Checkpoint, CheckpointState, TrainStep
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store
from agentrl.weights.folder import checksums

LEASE = 60.0
TRAINED, READY, ABANDONED = (task_key("train", 0, name) for name in ("trained", "ready", "abandoned"))
RUNNING, UNTOUCHED = (task_key("train", 0, name) for name in ("running", "untouched"))
STEP = "1/1"


def write_checkpoint(folder: Path, step: int, train_steps: tuple[str, ...]) -> Checkpoint:
    """Make a checkpoint without weights."""
    state = CheckpointState(
        run_name="run", step=step, policy_version=step, train_steps=train_steps, architecture={}
    )
    folder.mkdir(parents=True)
    (folder / STATE).write_text(json.dumps(asdict(state)))
    return Checkpoint(folder, state)


async def add_task(store: Store, key: str, order: int, generations: int = 2) -> None:
    """Load one task of split and epoch ``key`` names."""
    split, epoch, name = key.split("/")
    slots = tuple(Slot(traj_id=traj) for traj in range(generations))
    task = Task(
        id=key, task_id=name, split=split, epoch=int(epoch), order=order, query="What is 2 + 2?", slots=slots
    )
    await store.tasks.load([task])


async def claim(store: Store, split: str = "train") -> Claim:
    """Claim a slot and create its Record."""
    claimed = await store.claims.claim(split=split, owner="sampler", lease_seconds=LEASE)
    assert claimed is not None
    await store.records.create(claimed)
    await store.records.advance(claimed, RecordStatus.RUNNING)
    return claimed


def call(claimed: Claim, index: int, version: int, prompt_tokens: int) -> DispatchedSamplingTask:
    """A model call of four tokens behind two of context; a tool runs after every first one."""
    tools = (ToolExecution(name="add", arguments={}, result="4", error=False, seconds=0.1),)
    return DispatchedSamplingTask(
        id=f"{claimed.record_id}/{index}", record=claimed.record_id, index=index, attempt=claimed.attempt,
        parent=f"{claimed.record_id}/{index - 1}" if index else None, status=CallStatus.COMPLETED,
        messages=({"role": "user", "content": "?"},), response={"content": "!", "tool_calls": []},
        tool_executions=() if index else tools, finish_reason="stop",
        versions=(VersionSpan(version=version, start=0, end=4),), prompt_tokens=prompt_tokens,
        generated_tokens=4, engine="e", generate_seconds=0.1, context_ids=pack_ids([10 + index, 20]),
        output_ids=pack_ids([claimed.traj_id, 1, 2, 3]), logprobs=pack_floats([-0.5, -0.25, -1.0, -2.0]),
        routing=pack_routing(np.arange(10 + 2 * bool(index)).reshape(-1, 1, 2)),
    )  # fmt: skip


async def score(store: Store, claimed: Claim, value: float, *, version: int = 0) -> None:
    """Two model calls, then a score."""
    for index, prompt_tokens in enumerate((2, 8)):
        await store.model_calls.add(claimed, call(claimed, index, version, prompt_tokens))
    await store.records.advance(
        claimed, RecordStatus.COMPLETED, final_answer="4", stop_reason=StopReason.ANSWERED
    )
    await store.records.advance(claimed, RecordStatus.SCORING)
    await store.attempts.score(claimed, value, {"scorer": "exact"})


async def fail(store: Store, claimed: Claim, *, max_attempts: int) -> None:
    """End an attempt with a failure; where attempts are left, the slot opens at once."""
    failure = Failure(kind="engine", message="the engine went away")
    await store.attempts.fail(claimed, failure, max_attempts=max_attempts, backoff_seconds=0.0)


async def publish(store: Store, root: Path, version: int, *, step: int, train_step: str | None) -> Path:
    """Write and publish a version with two small files."""
    folder = root / f"v{version:06d}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes([version]) * 64)
    files = checksums(folder)
    await store.policy_versions.publish(
        PolicyVersion(id=version, step=step, location=str(folder), files=files, train_step=train_step)
    )
    return folder


async def build(store: Store, weights: Path, *, unfinished: bool = True) -> None:
    """A trained group, one that is ready, one abandoned and an evaluation; with ``unfinished``, more to do.

    The trained one has an attempt that failed, the abandoned one a slot that failed for good.
    """
    await publish(store, weights, 0, step=0, train_step=None)
    await add_task(store, TRAINED, 0)
    first = await claim(store)
    await store.model_calls.add(first, call(first, 0, 0, 2))
    await fail(store, first, max_attempts=3)
    for value in (0.0, 1.0):
        await score(store, await claim(store), value)
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    assert await finalizer.run_waiting() == 1
    data = tuple(meta.id for meta in await ready_data(store, "train"))
    assert len(data) == 2
    await store.steps.plan(TrainStep(id=STEP, step=1, policy_version=0, data=data, owner="trainer"))
    await store.steps.commit(STEP, {"loss": 0.1}, data)
    await publish(store, weights, 1, step=1, train_step=STEP)
    await add_task(store, READY, 1)
    for value in (0.0, 1.0):
        await score(store, await claim(store), value, version=1)
    await add_task(store, ABANDONED, 2)
    await fail(store, await claim(store), max_attempts=1)
    await score(store, await claim(store), 1.0, version=1)
    assert await finalizer.run_waiting() == 2
    await add_task(store, task_key("eval", 0, "one"), 0, generations=1)
    await score(store, await claim(store, "eval"), 1.0, version=1)
    assert await GroupFinalizer(store, GroupConfig(), split="eval", seed=0).run_waiting() == 1
    if unfinished:
        await add_task(store, RUNNING, 3)
        running = await claim(store)
        await store.model_calls.add(running, call(running, 0, 1, 2))
        await store.attempts.release(await claim(store))
        await add_task(store, UNTOUCHED, 4)
