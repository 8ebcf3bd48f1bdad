"""Kill the trainer of one run at random points, and compare the result with an undisturbed run.

    python -m chaos.trainer_kills --kills 10 --seed 0

Both runs sample synchronously from the same seed, one trajectory at a time. Steps, data, losses, rewards and
published weights must therefore be identical. Files need not be: a trainer that has just started publishes
whole weights where one that went on writes a delta.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.processes import (
    StoppedBySignalError,
    raise_on_signals,
    signal_session,
    start_child,
    stop_children,
    tail,
)
from agentrl.config.schema import RunConfig
from agentrl.documents.status import DataStatus
from agentrl.errors import AgentRLError
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store.client import Store, open_store
from chaos.actors import environment

GROUPS_PER_STEP = 2
GENERATIONS = 4
SAVE_STEPS = 3
STEP_SECONDS = 600.0
"""Time limit of one step."""

_START_SECONDS = 6.0
_STEP_SPREAD_SECONDS = 1.0
_EARLY_KILLS = 0.25
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings: ``kills`` of the trainer, spread over ``steps`` optimizer steps, in ``folder``."""

    kills: int
    steps: int
    seed: int
    folder: Path
    max_trained_count: int = 1

    def flags(self, run: str, uri: str) -> list[str]:
        """Return the flags of every process of one run."""
        tasks = (self.steps + 2) * GROUPS_PER_STEP
        return [
            "--run_name", run, "--db_connection_string", uri, "--seed", str(self.seed),
            "--output_dir", str(self.folder / run), "--log_dir", str(self.folder / "logs"),
            "--model_name_or_path", str(self.folder / "model"),
            "--train_file", str(_write_tasks(self.folder / "tasks.jsonl", tasks)),
            "--agent_name", "single_turn", "--max_new_tokens", "24", "--num_generations", str(GENERATIONS),
            "--sync_sampling", "true", "--max_concurrent_samples_per_process", "1",
            "--groups_per_step", str(GROUPS_PER_STEP), "--max_steps", str(self.steps),
            "--save_steps", str(SAVE_STEPS), "--learning_rate", "1e-3",
            "--max_trained_count", str(self.max_trained_count), "--heartbeat_seconds", "0.2",
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of a run; equal for both runs of a plan."""

    steps: tuple[tuple[int, int, tuple[str, ...]], ...]
    """(step, policy version at its start, ids of its data)."""
    losses: tuple[float, ...]
    rewards: tuple[float, ...]
    versions: tuple[tuple[int, int, str, str | None], ...]
    """(version, step, status, digest of all tensors); the given model is version 0, without a digest."""
    counts: dict[str, int]
    """{id of trained data: how often it was trained}."""
    off_policy: tuple[str, ...]
    """Ids of data with a token that was not sampled by the policy version at the start of its step."""


def compare(plan: Plan) -> tuple[Trained, Trained, int]:
    """Train undisturbed and with kills; return both results and the number of kills."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    model = [
        sys.executable,
        "-m",
        "agentrl.base.installation",
        "demo/tiny.py",
        str(plan.folder / "model"),
        str(plan.seed),
    ]
    subprocess.run(model, check=True, timeout=120, env=environment())
    mongo = EmbeddedMongo(plan.folder / "mongo")
    uri = mongo.up().uri
    try:
        undisturbed, _ = asyncio.run(_train(plan, "undisturbed", uri, kills=0))
        killed, kills = asyncio.run(_train(plan, "killed", uri, kills=plan.kills))
    finally:
        mongo.down()
    return undisturbed, killed, kills


async def _train(plan: Plan, run: str, uri: str, *, kills: int) -> tuple[Trained, int]:
    flags = plan.flags(run, uri)
    rng = random.Random(f"{plan.seed}/{kills}")
    async with await open_store(RunConfig(run_name=run, db_connection_string=uri)) as store:
        with _processes(plan, run, flags, ("serve", "sample")):
            for number in range(kills):
                earlier = (await store.trainer_lease.read()).attempt
                with _processes(plan, run, flags, ("train",)) as (trainer,):
                    after = number * plan.steps // kills
                    await _reach_kill(store, trainer, rng, earlier=earlier, after=after)
                    signal_session(trainer, signal.SIGKILL)
                    trainer.wait(10)
            with _processes(plan, run, flags, ("train",)) as (trainer,):
                await _reach_end(store, trainer, plan, run)
        return await _read(store), kills


async def _reach_kill(
    store: Store, trainer: subprocess.Popen[bytes], rng: random.Random, *, earlier: int, after: int
) -> None:
    """Wait until a random moment: while the trainer starts, or in the first steps after ``after``.

    ``earlier`` is the attempt of the trainer before it.
    """
    if rng.random() < _EARLY_KILLS:
        await asyncio.sleep(rng.uniform(0.0, _START_SECONDS))
        return
    deadline = time.monotonic() + STEP_SECONDS
    while trainer.poll() is None and time.monotonic() < deadline:
        lease = await store.trainer_lease.read()
        if lease.attempt > earlier:
            planned = await store.steps.find(after=after, status=None)
            if any(step.id.startswith(f"{lease.attempt}/") for step in planned):
                break
        await asyncio.sleep(_POLL_SECONDS)
    await asyncio.sleep(rng.uniform(0.0, _STEP_SPREAD_SECONDS))


async def _reach_end(store: Store, trainer: subprocess.Popen[bytes], plan: Plan, run: str) -> None:
    """Wait until the trainer ends. Raises AgentRLError if it fails or makes no step for ``STEP_SECONDS``."""
    reached, moved_at = 0, time.monotonic()
    while trainer.poll() is None:
        last = await store.steps.last()
        if last is not None and last.step != reached:
            reached, moved_at = last.step, time.monotonic()
        if time.monotonic() - moved_at > STEP_SECONDS:
            break
        await asyncio.sleep(_POLL_SECONDS)
    if trainer.returncode != 0:
        log = _log(plan, run, "train")
        raise AgentRLError(
            f"the trainer of {run} ended at step {reached} with exit code {trainer.returncode}:\n{tail(log)}",
            hint=f"read {log} and the logs beside it",
        )


async def _read(store: Store) -> Trained:
    steps = await store.steps.find()
    data = {item["_id"]: item async for item in store.database["DBRecordData"].find({}, _READ)}
    versions = await store.policy_versions.all()
    off_policy = [
        key
        for step in steps
        for key in step.data
        if {data[key]["min_version"], data[key]["max_version"]} != {step.policy_version}
    ]
    trained = {key: item for key, item in data.items() if item["trained_count"]}
    assert all(item["status"] in (DataStatus.TRAINED, DataStatus.READY) for item in trained.values())
    return Trained(
        steps=tuple((step.step, step.policy_version, step.data) for step in steps),
        losses=tuple(step.metrics["loss"] for step in steps),
        rewards=tuple(step.metrics["reward"] for step in steps),
        versions=tuple((v.id, v.step, str(v.status), v.digest) for v in versions),
        counts={key: item["trained_count"] for key, item in sorted(trained.items())},
        off_policy=tuple(off_policy),
    )


_READ = {"trained_count": 1, "status": 1, "min_version": 1, "max_version": 1}


@contextlib.contextmanager
def _processes(
    plan: Plan, run: str, flags: list[str], commands: tuple[str, ...]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes for the duration of the block."""
    started = [
        start_child(
            [sys.executable, "-m", "agentrl", command, *flags],
            log=_log(plan, run, command), env=environment(),
        )
        for command in commands
    ]  # fmt: skip
    try:
        yield started
    finally:
        stop_children(started)


def _log(plan: Plan, run: str, command: str) -> Path:
    return plan.folder / "logs" / f"{run}-{command}.out"


def _write_tasks(path: Path, count: int) -> Path:
    if not path.exists():
        lines = (
            json.dumps({"id": f"t{number:03d}", "q": f"{number}+{number}=?", "a": "0", "scorer": _SCORER})
            for number in range(count)
        )
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


_SCORER = "chaos.scoring:hashed_score"


def _print(undisturbed: Trained, killed: Trained) -> None:
    print(
        f"{'step':>5} {'trajectories':>12}  {'loss':>24}  {'loss, killed':>24}  {'reward':>8}  {'killed':>8}"
    )
    for index, (step, _, data) in enumerate(undisturbed.steps):
        other = index < len(killed.steps)
        print(
            f"{step:>5} {len(data):>12}  {undisturbed.losses[index]:>24.17g}"
            f"  {killed.losses[index] if other else float('nan'):>24.17g}"
            f"  {undisturbed.rewards[index]:>8.5f}"
            f"  {killed.rewards[index] if other else float('nan'):>8.5f}"
        )


def main(argv: list[str] | None = None) -> int:
    """Compare and print; return 0 if both runs trained the same."""
    parser = argparse.ArgumentParser(prog="scripts/kill_trainer.sh", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs of the trainer")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs and of the kills")
    parser.add_argument("--folder", type=Path, help="folder of all files (default: a temporary folder)")
    options = parser.parse_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="agentrl-kill-trainer-"))
    plan = Plan(kills=options.kills, steps=options.steps, seed=options.seed, folder=folder)
    started = time.monotonic()
    try:
        with raise_on_signals():
            undisturbed, killed, kills = compare(plan)
    except StoppedBySignalError as stopped:
        return stopped.exit_code
    _print(undisturbed, killed)
    same = undisturbed == killed
    print(
        f"{len(killed.steps)} steps, {sum(killed.counts.values())} trajectories trained, {kills} kills of the"
        f" trainer, {time.monotonic() - started:.0f} s; {len(killed.off_policy)} off-policy:"
        f" {'identical' if same else f'different (see {folder})'}"
    )
    return 0 if same and not killed.off_policy else 1


if __name__ == "__main__":
    sys.exit(main())
