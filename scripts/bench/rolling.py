"""Compare a run whose samplers are restarted every minute with one that is left in peace.

    python scripts/bench/rolling.py [--quick] [--seeds 1] [--steps 30] [--json FILE]

Each seed trains the two-layer model of ``learning.py --case frozen_lake`` twice, with a local engine, two
samplers and a trainer of their own: trajectories of several turns in an environment whose state is made again
by replay. In the second run the older sampler gets SIGTERM every 30 seconds and is replaced, so that all are
restarted once a minute, one after the other. ``agentrl db check`` checks each run. Exits with 1 if a step of
the restarted run takes more than 1.1 × the seconds, or if its mean reward over the second half of the steps
is lower by more than two standard errors.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

import demo_path  # noqa: F401
from commands import agentrl, command, database, environment
from durable import Case as Restarts
from durable import Samplers
from harness import Row, bench_parser, finish
from learning import prepare_model
from learning_cases import CASES, Case, quick_case

from agentrl.base.processes import start_child, stop_child, tail
from agentrl.config.schema import RunConfig
from agentrl.store.client import open_existing

SAMPLERS = 2
MINUTE = 60.0
LIMIT_SECONDS = 1200.0
_POLL_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training."""

    rewards: list[float]
    """The mean reward of each step."""
    seconds: list[float]
    """From each step's end to the next one's."""
    restarts: int
    continued: int
    """Trajectories that had more than one owner."""

    @property
    def late(self) -> list[float]:
        """Return the rewards of the second half of the steps."""
        return self.rewards[len(self.rewards) // 2 :]

    @property
    def error(self) -> float:
        """Return the standard error of the mean of ``late``."""
        return stdev(self.late) / len(self.late) ** 0.5 if len(self.late) > 1 else 0.0


def train(case: Case, seed: int, work: Path, restarts: Restarts) -> Outcome:
    """Train once; samplers are restarted as ``restarts`` says. Exits if a process fails."""
    name = f"rolling-{seed}-{'restarted' if restarts.kill_every else 'peace'}"
    run = RunConfig(run_name=name, mongo_dir=str(work / "mongo"), log_dir=str(work / "logs" / name))
    logs = Path(run.log_dir)
    common = [
        "--run_name", run.run_name, "--mongo_dir", run.mongo_dir, "--log_dir", run.log_dir,
        "--seed", str(seed), "--model_name_or_path", str(prepare_model(case, seed, work)),
        "--output_dir", str(work / "output" / name), *case.flags,
        "--max_concurrent_samples_per_process", "32",
    ]  # fmt: skip
    tasks = ["--train_file", case.address(case.training_tasks, 1)]
    steps = ["--max_steps", str(case.steps), "--save_steps", str(10 * case.steps), "--publish_steps", "1"]
    samplers = Samplers(
        restarts, command("sample", [*common, *tasks]), logs / "sample.out", random.Random(seed)
    )
    engine = start_child(command("serve", common), log=logs / "serve.out", env=environment())
    samplers.start()
    trainer = start_child(
        command("train", [*common, *steps]), log=(log := logs / "train.out"), env=environment()
    )
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        samplers.begin_kills()
        while trainer.poll() is None:
            if time.monotonic() > deadline or engine.poll() is not None:
                raise SystemExit(f"the run does not end, or its engine has; logs: {logs}\n{tail(log)}")
            samplers.kill_due()
            time.sleep(_POLL_SECONDS)
    finally:
        stop_child(trainer)
        samplers.stop()
        stop_child(engine)
    if trainer.returncode != 0:
        raise SystemExit(f"the trainer ended with exit code {trainer.returncode}:\n{tail(log)}")
    agentrl("db", ["check", *common[:4], "--output_dir", str(work / "output" / name)], work)
    return asyncio.run(read(run, samplers.kills))


async def read(run: RunConfig, restarts: int) -> Outcome:
    """Read what a training did from its database."""
    async with await open_existing(run) as store:
        steps = [step for step in await store.steps.find() if "reward" in step.metrics]
        ends = [step.committed_at.timestamp() for step in steps if step.committed_at is not None]
        continued = await store.database["Record"].count_documents({"owners.1": {"$exists": True}})
    return Outcome(
        rewards=[step.metrics["reward"] for step in steps], restarts=restarts, continued=continued,
        seconds=[after - before for before, after in pairwise(ends)] or [0.0],
    )  # fmt: skip


def rows(seed: int, peace: Outcome, restarted: Outcome) -> list[Row]:
    """Return the lines of one seed."""
    what = f"seed {seed}, {restarted.restarts} restarts, {restarted.continued} trajectories went on: "
    low = fmean(peace.late) - 2 * (peace.error**2 + restarted.error**2) ** 0.5
    return [
        Row(
            what=f"{what}seconds of a step (median of {len(restarted.seconds)})",
            ours=f"{median(restarted.seconds):.2f}", baseline=f"{median(peace.seconds):.2f}",
            ratio=median(restarted.seconds) / (median(peace.seconds) or 1.0), target=1.1, more=False,
        ),
        Row(
            what=f"seed {seed}: reward, second half of the steps", ours=f"{fmean(restarted.late):.3f}",
            baseline=f"{fmean(peace.late):.3f} (≥ {low:.3f})",
            ratio=fmean(restarted.late) / (fmean(peace.late) or 1.0),
            target=low / (fmean(peace.late) or 1.0),
        ),
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    """Train each seed both ways, print a table, and return 1 if a target is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    parser.add_argument("--steps", type=int, default=30, help="steps of each training (default: 30)")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args(argv)
    case = replace(CASES["frozen_lake"], steps=options.steps)
    if options.quick:
        case = quick_case(case)
    peace = Restarts(turns=0, tool=0.0, concurrency=0, samplers=SAMPLERS, drains=True)
    restarted = replace(peace, kill_every=5.0 if options.quick else MINUTE / SAMPLERS)
    lines: list[Row] = []
    with database() as (work, _):
        for seed in range(options.seeds):
            found = [train(case, seed, work, each) for each in (peace, restarted)]
            for outcome in found:
                curve = json.dumps([round(reward, 3) for reward in outcome.rewards])
                print(f"seed {seed}, {outcome.restarts} restarts: {curve}", file=sys.stderr, flush=True)
            lines += rows(seed, *found)
    return finish("samplers restarted every minute", lines, quick=options.quick, file=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
