"""Withdraw trajectories of one step, and compare the run with one that never held them.

    python -m chaos.retraction --steps 10 --at 7 --withdrawn 5 --kills 10 --seed 0

Both runs train the same stored groups. The first trains all steps, loses some trajectories of a step by
``agentrl retract --rebuild``, which is killed meanwhile, and trains the later steps again. The weights of all
later versions must be those of the second, and nothing but tombstones may name what is withdrawn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from forked import run_forked
from tiny_policy import write_tiny_policy

from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.status import CallStatus, RecordStatus, StopReason
from agentrl.documents.task import Claim, Slot, Task, record_key, task_key
from agentrl.local.mongod import EmbeddedMongo
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics import blobs
from agentrl.weights.publish import publish_base
from chaos.actors import environment

GROUPS_PER_STEP = 2
SAVE_STEPS = 3
_TOKENS = 12
_LONGEST_KILL_SECONDS = 0.4
_POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``withdrawn`` trajectories of step ``at`` are withdrawn from a run of ``steps`` optimizer steps."""

    steps: int
    at: int
    withdrawn: int
    generations: int
    kills: int
    seed: int
    folder: Path
    uri: str

    def config(self, run: str) -> RunConfig:
        """Return the database of ``run``."""
        return RunConfig(run_name=run, db_connection_string=self.uri)

    def train(self, run: str) -> None:
        """Train all steps of ``run`` in a forked process. Raises AssertionError if it fails."""
        flags = [
            "--run_name", run, "--db_connection_string", self.uri, "--output_dir", str(self.folder / run),
            "--log_dir", str(self.folder / "logs"), "--model_name_or_path", str(self.folder / "model"),
            "--groups_per_step", str(GROUPS_PER_STEP), "--num_generations", str(self.generations),
            "--max_staleness", "99", "--learning_rate", "1e-2", "--save_steps", str(SAVE_STEPS),
            "--save_total_limit", "99", "--max_steps", str(self.steps), "--seed", str(self.seed),
        ]  # fmt: skip
        code, output = run_forked(("-m", "agentrl.train"), flags, self.folder / f"{run}.log", 280)
        assert code == 0, output

    def retract(self, run: str, *words: str) -> list[str]:
        """Return the command line of ``agentrl retract``."""
        folders = ["--log_dir", str(self.folder / "logs"), "--archive", str(self.folder / "exports")]
        where = ["--db_connection_string", self.uri, "--yes", "--rebuild", *folders]
        return [sys.executable, "-m", "agentrl", "retract", run, *where, *words]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What both runs trained, and where the withdrawn ids are found."""

    withdrawn: tuple[str, ...]
    retracted: tuple[tuple[Any, ...], ...]
    """(step, data, loss) of each step."""
    control: tuple[tuple[Any, ...], ...]
    before: tuple[tuple[Any, ...], ...]
    """Of the run before anything was withdrawn."""
    weights: tuple[tuple[int, str, str], ...]
    """(step, digest of the retracted run, of the control) of the steps that both published."""
    found: dict[str, int]
    """{collection or file: how many documents or lines name them}."""
    kills: int
    half_done: int
    """Kills that left a retraction unfinished."""


async def fill(store: Store, plan: Plan, without: Collection[str] = ()) -> None:
    """Store finalized groups for every step, except the trajectories ``without``."""
    await publish_base(store, plan.folder / "model")
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=plan.seed)
    for order in range(plan.steps * GROUPS_PER_STEP):
        key = task_key("train", 0, f"t{order:03d}")
        slots = [
            Slot(traj_id=number)
            for number in range(plan.generations)
            if record_key(key, number, 1) not in without
        ]
        task = Task(
            id=key, task_id=f"t{order:03d}", split="train", epoch=0, order=order, query=f"{order} + 1?",
            slots=tuple(slots),
        )  # fmt: skip
        await store.tasks.load([task])
        for _ in slots:
            claim = await store.claims.claim(split="train", owner="sampler", lease_seconds=60.0)
            assert claim is not None
            await _sample(store, claim)
        assert await finalizer.run_waiting() == 1


async def _sample(store: Store, claim: Claim) -> None:
    rng = np.random.default_rng(list(claim.record_id.encode()))
    call = DispatchedSamplingTask(
        id=f"{claim.record_id}/0", record=claim.record_id, index=0, parent=None, status=CallStatus.COMPLETED,
        messages=({"role": "user", "content": claim.task.query},), response={"content": "!"},
        finish_reason="stop", versions=(VersionSpan(version=0, start=0, end=_TOKENS),), prompt_tokens=4,
        generated_tokens=_TOKENS, engine="e", generate_seconds=0.1,
        context_ids=pack_ids(rng.integers(0, 250, 4).tolist()),
        output_ids=pack_ids(rng.integers(0, 250, _TOKENS).tolist()),
        logprobs=pack_floats([-5.5] * _TOKENS),
    )  # fmt: skip
    await store.records.create(claim)
    await store.records.advance(claim, RecordStatus.RUNNING)
    await store.model_calls.add(claim, call)
    answered: dict[str, Any] = {"final_answer": "4", "stop_reason": StopReason.ANSWERED}
    await store.records.advance(claim, RecordStatus.COMPLETED, **answered)
    await store.records.advance(claim, RecordStatus.SCORING)
    await store.attempts.score(claim, float(rng.random()), {"scorer": "exact"})


async def trained(store: Store) -> tuple[tuple[Any, ...], ...]:
    """Return (step, data, loss) of each committed step."""
    return tuple((step.step, step.data, step.metrics["loss"]) for step in await store.steps.find())


async def digests(store: Store) -> dict[int, str]:
    """Return {step: digest of its published weights}; a trainer may skip the weights of a step."""
    versions = await store.policy_versions.all()
    return {
        version.step: version.digest
        for version in versions
        if version.status == "published" and version.digest is not None
    }


async def search(store: Store, folder: Path, ids: Collection[str]) -> dict[str, int]:
    """Return where one of ``ids`` is found: collections with GridFS, and every file under ``folder``."""
    found: dict[str, int] = {}
    listed = await store.database.list_collection_names(filter={"type": "collection"})
    for name in (name for name in listed if not name.startswith("system.")):
        async for document in store.database[name].find({}):
            if any(key in repr(document) for key in ids):
                found[name] = found.get(name, 0) + 1
    return found | await asyncio.to_thread(search_files, folder, ids)


def search_files(folder: Path, ids: Collection[str]) -> dict[str, int]:
    """Return {file: how many of its lines name one of ``ids``} of every file, except the database's own."""
    found: dict[str, int] = {}
    for path in (path for path in folder.rglob("*") if path.is_file() and "mongo" not in path.parts):
        lines = path.read_bytes().split(b"\n")
        if count := sum(any(key.encode() in line for key in ids) for line in lines):
            found[str(path.relative_to(folder))] = count
    return found


def kill_often(plan: Plan, words: list[str], rng: random.Random) -> int:
    """Call the command and SIGKILL it, ``plan.kills`` times; return how many calls left it half done."""
    half_done = 0
    for _ in range(plan.kills):
        earlier = asyncio.run(_attempt(plan))
        with subprocess.Popen(plan.retract("retracted", *words), env=environment()) as process:
            while process.poll() is None and asyncio.run(_attempt(plan)) == earlier:
                time.sleep(_POLL_SECONDS)
            time.sleep(rng.uniform(0.0, _LONGEST_KILL_SECONDS))
            process.send_signal(signal.SIGKILL)
        half_done += asyncio.run(_is_half_done(plan))
    return half_done


async def _attempt(plan: Plan) -> int:
    """Return the attempt of the last trainer: the rebuilding, too, is one."""
    async with await open_store(plan.config("retracted")) as store:
        return (await store.trainer_lease.read()).attempt


async def _is_half_done(plan: Plan) -> bool:
    async with await open_store(plan.config("retracted")) as store:
        return await store.database["Retraction"].count_documents({"finished_at": None}) > 0


def compare(plan: Plan) -> Result:
    """Train, withdraw and train again; train the control; search for what is withdrawn."""
    write_tiny_policy(plan.folder / "model")
    rng = random.Random(plan.seed)

    async def begin() -> None:
        with mock.patch.object(blobs, "_LIMIT", 0):  # every packed array goes to GridFS
            async with await open_store(plan.config("retracted")) as store:
                await fill(store, plan)

    async def choose() -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
        from agentrl.lab.transfer import TrajectoryDataset, Transfer

        async with await open_store(plan.config("retracted")) as store:
            before = await trained(store)
            exports = plan.folder / "exports"
            await Transfer(store.connection).export(exports / "archive")
            await TrajectoryDataset(store.connection, on_rows=lambda rows: None).export(exports / "dataset")
        return tuple(sorted(rng.sample(before[plan.at - 1][1], plan.withdrawn))), before

    async def end(ids: tuple[str, ...]) -> dict[str, Any]:
        async with await open_store(plan.config("retracted")) as store:
            retracted, ours = await trained(store), await digests(store)
            found = await search(store, plan.folder, ids)
        async with await open_store(plan.config("control")) as store:
            theirs = await digests(store)
            both = tuple((step, ours[step], theirs[step]) for step in sorted(ours.keys() & theirs.keys()))
            return {
                "retracted": retracted, "control": await trained(store), "found": found, "weights": both,
            }  # fmt: skip

    async def control(ids: tuple[str, ...]) -> None:
        async with await open_store(plan.config("control")) as store:
            await fill(store, plan, ids)

    asyncio.run(begin())
    plan.train("retracted")
    ids, before = asyncio.run(choose())
    words = [word for key in ids for word in ("--record", key)]
    half_done = kill_often(plan, words, rng)
    subprocess.run(plan.retract("retracted", *words), env=environment(), check=True, timeout=200)
    plan.train("retracted")
    asyncio.run(control(ids))
    plan.train("control")
    ended = asyncio.run(end(ids))
    return Result(withdrawn=ids, before=before, kills=plan.kills, half_done=half_done, **ended)


def main(argv: list[str] | None = None) -> int:
    """Compare and print; return 0 if both runs trained the same and only tombstones are found."""
    parser = argparse.ArgumentParser(prog="scripts/retract.sh", description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--at", type=int, default=7, help="the step that loses trajectories")
    parser.add_argument("--withdrawn", type=int, default=5, help="how many")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs of agentrl retract")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="agentrl-retract-"))
    mongo = EmbeddedMongo(folder / "mongo")
    started = time.monotonic()
    try:
        result = compare(Plan(**vars(options), folder=folder, uri=mongo.up().uri))
    finally:
        mongo.down()
    print(f"withdrawn: {', '.join(result.withdrawn)}")
    print(f"{'step':>5} {'data':>5} {'control':>8} {'loss before':>24} {'retracted':>24} {'control':>24}")
    for old, new, other in zip(result.before, result.retracted, result.control, strict=True):
        losses = " ".join(f"{step[2]:>24.17g}" for step in (old, new, other))
        print(f"{new[0]:>5} {len(new[1]):>5} {len(other[1]):>8} {losses}")
    for step, ours, theirs in result.weights:
        print(f"weights of step {step}: {ours[:16]} {theirs[:16]}")
    is_same = result.retracted == result.control and all(ours == theirs for _, ours, theirs in result.weights)
    only_stones = all("Tombstone" in name for name in result.found)
    print(f"kills: {result.kills}, of which {result.half_done} left it half done")
    print(f"found: {result.found}")
    print(f"{'identical' if is_same else 'DIFFERENT'}, {time.monotonic() - started:.0f} s")
    return 0 if is_same and only_stones else 1


if __name__ == "__main__":
    sys.exit(main())
