"""Make a stored run of many trained trajectories: one step by the calls of the store, and copies of it."""

from __future__ import annotations

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
_BATCH = 2000
_LEASE = 3600.0


def finalizer(store: Store) -> GroupFinalizer:
    """Return a finalizer that keeps groups of equal scores."""
    return GroupFinalizer(store, GroupConfig(min_score_spread=0.0), split=SPLIT, seed=0)


async def load_groups(store: Store, first: int, count: int) -> None:
    """Load Tasks whose names have a fixed length, in the order ``first`` and following."""
    tasks = []
    for number, task in enumerate(make_tasks(count), first):
        name = f"s{number // STEP_GROUPS:05d}g{number % STEP_GROUPS}"
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
    """Store a run of ``trajectories`` trained ones, and behind them ready and scored groups."""
    version = PolicyVersion(id=0, step=0, location="", files=(), train_step=None)
    await store.policy_versions.publish(version)
    await load_groups(store, 0, STEP_GROUPS)
    await sample(store, STEP_SIZE)
    await finalizer(store).run_completed()
    data = [item["_id"] async for item in store.database["DBRecordData"].find({}, {"_id": 1})]
    tasks = [item["_id"] async for item in store.database["Task"].find({}, {"_id": 1})]
    await train_step(store, 1, data, tasks)
    steps = trajectories // STEP_SIZE
    await _copy_step(store, steps)
    await load_groups(store, steps * STEP_GROUPS, ready_groups + waiting_groups)
    await sample(store, ready_groups * GENERATIONS)
    await finalizer(store).run_completed()
    await sample(store, waiting_groups * GENERATIONS)


async def _copy_step(store: Store, steps: int) -> None:
    """Copy the documents of the first step for each of the steps behind it."""
    raw = CodecOptions(document_class=RawBSONDocument)
    for name in _COPIED:
        documents = await store.database[name].with_options(codec_options=raw).find().to_list()
        batch: list[Json] = []
        for number in range(1, steps):
            batch += [_copied(name, document.raw, number) for document in documents]
            if len(batch) >= _BATCH or number == steps - 1:
                await store.database[name].insert_many(batch, ordered=False)
                batch = []


def _copied(collection: str, raw: bytes, number: int) -> Json:
    """Return a document of the first step as one of step ``number`` + 1, with its checksums."""
    # Replace in the encoded bytes: names have one length, and lie in ids of every depth.
    document: Json = bson.decode(raw.replace(b"s00000g", b"s%05dg" % number))
    step = number + 1
    match collection:
        case "Task":
            document["order"] += STEP_GROUPS * number
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
