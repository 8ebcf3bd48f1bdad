"""Make a stored run of many trained trajectories: one step by the calls of the store, and copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from store_fixtures import GENERATIONS, SPLIT, make_call, make_tasks

from agentrl.config.schema import GroupConfig
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim
from agentrl.documents.training import TrainStep
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store
from agentrl.store.mechanics.blobs import CHECKSUMS, changed_parts

Json = dict[str, Any]
STEP_GROUPS: Final = 8
STEP_SIZE: Final = STEP_GROUPS * GENERATIONS
_COPIED = ("Task", "Record", "DispatchedSamplingTask", "DBRecordData", "TrainStep")
_BATCH = 32
_LEASE = 3600.0


def finalizer(store: Store) -> GroupFinalizer:
    """Return a finalizer that keeps groups of equal scores."""
    return GroupFinalizer(store, GroupConfig(min_score_spread=0.0), split=SPLIT, seed=0)


async def load_step(store: Store) -> None:
    """Load the Tasks of a step, whose names have a fixed length."""
    tasks = []
    for number, task in enumerate(make_tasks(STEP_GROUPS)):
        name = f"s00000g{number}"
        document = task.to_document() | {"_id": f"{SPLIT}/0/{name}", "task_id": name, "order": number}
        tasks.append(type(task).from_document(document))
    await store.tasks.load(tasks)


async def sample(store: Store, trajectories: int) -> None:
    """Write the next ``trajectories`` from claim to score; every other score is 1."""
    for number in range(trajectories):
        claim = await store.claims.claim(
            split=SPLIT, owner="bench", lease_seconds=_LEASE, max_groups_open=1_000_000
        )
        assert claim is not None
        await _sample(store, claim, float(number % 2))


async def _sample(store: Store, claim: Claim, score: float) -> None:
    await store.records.create(claim)
    await store.records.advance(claim, RecordStatus.RUNNING)
    await store.model_calls.add(
        claim, make_call(claim.record_id, 0, context=64, output=8, version=0, seed=claim.traj_id)
    )
    await store.records.advance(claim, RecordStatus.COMPLETED, final_answer="1889", stop_reason="answered")
    await store.records.advance(claim, RecordStatus.SCORING)
    await store.attempts.score(claim, score, {"scorer": "exact"})


async def train_step(store: Store, number: int, data: list[str], tasks: list[str]) -> None:
    """Plan and commit a step."""
    step = TrainStep(id=f"1/{number}", step=number, policy_version=0, data=tuple(sorted(data)), owner="bench")
    await store.steps.plan(step)
    await store.steps.commit(step.id, {"loss": 0.5, "reward": 0.5}, step.data, counted=tasks)


async def make_run(store: Store, trajectories: int, ready_groups: int, waiting_groups: int) -> None:
    """Store a run of ``trajectories`` trained ones; behind them ready and scored groups, by whole steps."""
    version = PolicyVersion(id=0, step=0, location="", files=(), train_step=None)
    await store.policy_versions.publish(version)
    await load_step(store)
    await sample(store, STEP_SIZE)
    waiting = await _documents(store)
    await finalizer(store).run_completed()
    ready = await _documents(store)
    data = [item["_id"] async for item in store.database["DBRecordData"].find({}, {"_id": 1})]
    tasks = [item["_id"] async for item in store.database["Task"].find({}, {"_id": 1})]
    await train_step(store, 1, data, tasks)
    trained = trajectories // STEP_SIZE
    behind = trained + ready_groups // STEP_GROUPS
    steps = behind + waiting_groups // STEP_GROUPS
    await _copy(store, await _documents(store), range(1, trained), is_trained=True)
    await _copy(store, ready, range(trained, behind))
    await _copy(store, waiting, range(behind, steps))
    whole = {"$set": {"tasks": steps * STEP_GROUPS}}
    await store.database["Epoch"].update_one({"_id": f"{SPLIT}/0"}, whole)


async def _documents(store: Store) -> dict[str, list[bytes]]:
    """Return the documents of the first step as they are now."""
    raw = CodecOptions(document_class=RawBSONDocument)
    return {
        name: [item.raw async for item in store.database[name].with_options(codec_options=raw).find()]
        for name in _COPIED
    }


async def _copy(
    store: Store, documents: dict[str, list[bytes]], steps: Sequence[int], *, is_trained: bool = False
) -> None:
    """Store the documents of the first step once more for each of ``steps``."""
    for name, found in documents.items():
        for begin in range(0, len(steps), _BATCH):
            batch = [
                _copied(name, raw, number, is_trained)
                for number in steps[begin : begin + _BATCH]
                for raw in found
            ]
            if batch:
                await store.database[name].insert_many(batch, ordered=False)


def _copied(collection: str, raw: bytes, number: int, is_trained: bool) -> Json:
    """Return a document of the first step as one of step ``number`` + 1, with its checksums."""
    # Replace in the encoded bytes: names have one length, and lie in ids of every depth.
    document: Json = bson.decode(raw.replace(b"s00000g", b"s%05dg" % number))
    step = number + 1
    if collection == "Task":
        document["order"] += STEP_GROUPS * number
    if is_trained:
        match collection:
            case "Task":
                document["group"]["counted_at_step"] = step
            case "TrainStep":
                document |= {"_id": f"1/{step}", "step": step}
            case "DBRecordData":
                document["trained_at_steps"] = [step]
            case "Record":
                document["last_trained_step"] = step
    for part, _, now in list(changed_parts(collection, document)):
        document[CHECKSUMS][part] = now
    return document
