"""Train the tiny model with slow tools, asynchronously and with --sync_sampling, and print both curves.

    python scripts/bench/async_sampling.py [--quick] [--steps 30] [--seeds 0 1 2] [--median 1.0] [--json FILE]

The calculator takes a simulated time of log-normal distribution (sigma 1, median --median seconds); model,
engine, trainer and database are real. Each seed trains twice to --steps steps, in new processes. ``steps in
the same time`` compares the asynchronous run with the steps of the synchronous one at the moment when the
asynchronous one ended; both clocks start at the first claim. Exits with 1 if a target is missed: 2.5 times
the steps, and final rewards whose means differ by no more than two standard errors. --quick trains one step,
asynchronously.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_path  # noqa: F401
from commands import database, train_run
from demo.arithmetic import evaluate
from demo.tiny import build_tiny_model, prepare_tiny_model
from harness import Row, bench_parser, finish

from agentrl.config.schema import RunConfig
from agentrl.store.client import open_store

MEDIAN_SECONDS = "AGENTRL_BENCH_TOOL_SECONDS"
SIGMA = 1.0
TARGET = 2.5
LAST = 5
"""Steps at the end over which the final reward is averaged."""

MODES = {
    "async": ["--max_staleness", "4", "--max_concurrent_samples_per_process", "256"],
    "sync": ["--sync_sampling", "--max_staleness", "0", "--max_concurrent_samples_per_process", "256"],
}
QUICK = (
    "--num_generations", "2", "--groups_per_step", "1", "--max_turns", "2", "--min_score_spread", "0",
    "--drop_zero_advantage", "false",
)  # fmt: skip
_CONFIG = "assets/configs/quickstart-tiny.yml"
_MINUTES = 40.0
_WIDTH = 60


class Calculator:
    """The quickstart's calculator, slow."""

    async def calculate(self, expression: str) -> str:
        """Evaluates arithmetic."""
        await asyncio.sleep(float(os.environ[MEDIAN_SECONDS]) * random.lognormvariate(0.0, SIGMA))
        return evaluate(expression)


calculator = Calculator
"""The tool under the name that the tasks give it."""


@dataclass(frozen=True)
class Curve:
    """The committed steps of one run: seconds since the first claim, and mean reward."""

    seconds: list[float]
    rewards: list[float]

    @property
    def final(self) -> float:
        """The mean reward of the last steps."""
        return statistics.fmean(self.rewards[-LAST:])

    def steps_within(self, seconds: float) -> float:
        """Return the number of steps after ``seconds``, with the fraction of the one under way."""
        done = sum(each <= seconds for each in self.seconds)
        if done == len(self.seconds):
            return float(done)
        before = self.seconds[done - 1] if done else 0.0
        return done + (seconds - before) / (self.seconds[done] - before)


def train(mode: str, seed: int, options: argparse.Namespace, folder: Path, mongo: Path) -> Curve:
    """Train one run to its steps, and return its curve."""
    name = f"bench_{mode}_{seed}_{uuid.uuid4().hex[:6]}"
    model = build_tiny_model(folder / "model", 0) if options.quick else prepare_tiny_model(0, print)
    common = [
        "--config", _CONFIG, "--run_name", name, "--log_dir", str(folder / name), "--mongo_dir", str(mongo),
        "--model_name_or_path", str(model), "--seed", str(seed), "--tools", "async_sampling:calculator",
        *MODES[mode], *(QUICK if options.quick else ()),
    ]  # fmt: skip
    flags = {
        "serve": [*common, "--engine", "local"],
        "sample": common,
        "train": [*common, "--max_steps", str(options.steps), "--output_dir", str(folder / name / "output")],
    }
    variables = {MEDIAN_SECONDS: str(options.median), "PYTHONPATH": str(Path(__file__).parent)}
    train_run(flags, folder / name, 60 * _MINUTES, variables)
    return asyncio.run(read_curve(name, mongo))


async def read_curve(name: str, mongo: Path) -> Curve:
    """Read the steps of a run; its clock starts with the first Record."""
    async with await open_store(RunConfig(run_name=name, mongo_dir=str(mongo))) as store:
        steps = await store.steps.find()
        first = await store.database["Record"].find_one({}, sort=[("created_at", 1)])
        if first is None:
            raise RuntimeError(f"{name} has no Record")
        begin = first["created_at"]
        ends = [step.committed_at for step in steps if step.committed_at is not None]
        seconds = [(end.replace(tzinfo=None) - begin.replace(tzinfo=None)).total_seconds() for end in ends]
        return Curve(seconds, [float(step.metrics["reward"]) for step in steps])


def print_curves(seed: int, curves: dict[str, Curve]) -> None:
    """Print the reward of both runs over time, as one line per step."""
    longest = max(curve.seconds[-1] for curve in curves.values())
    print(f"\nseed {seed}: reward by time, one line per step, {longest:.0f} s wide")
    for mode, curve in curves.items():
        for number, (seconds, reward) in enumerate(zip(curve.seconds, curve.rewards, strict=True), 1):
            place = round(_WIDTH * seconds / longest)
            print(f"{mode:>5} {number:3d} {seconds:7.1f} s {reward:6.3f} |{' ' * place}*")


def rows(curves: list[dict[str, Curve]]) -> list[Row]:
    """Return the speed and the final rewards of all seeds."""
    ratios = [
        len(each["async"].seconds) / each["sync"].steps_within(each["async"].seconds[-1]) for each in curves
    ]
    finals = {mode: [each[mode].final for each in curves] for mode in MODES}
    means = {mode: statistics.fmean(values) for mode, values in finals.items()}
    noise = 2 * sum(_standard_error(values) ** 2 for values in finals.values()) ** 0.5
    difference = abs(means["async"] - means["sync"])
    return [
        Row(
            what=f"steps in the same time, {len(curves)} seeds ({', '.join(f'{x:.2f}' for x in ratios)})",
            ours="async", baseline="--sync_sampling", ratio=statistics.fmean(ratios), target=TARGET,
        ),
        Row(
            what="final reward: difference of the means by two standard errors", ours=f"{means['async']:.3f}",
            baseline=f"{means['sync']:.3f}", ratio=difference / noise if noise else None, target=1.0,
            more=False,
        ),
    ]  # fmt: skip


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def main(argv: list[str]) -> int:
    """Train every seed in both modes, print the curves and the table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--median", type=float, default=1.0, help="median time of a tool call, in seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.quick:
        options.steps, options.seeds, options.median = 1, [0], 0.01
    curves: list[dict[str, Curve]] = []
    with database() as (folder, _):
        for seed in options.seeds:
            modes = ["async"] if options.quick else [*MODES]
            found = {mode: train(mode, seed, options, folder, folder / "mongo") for mode in modes}
            found.setdefault("sync", found["async"])
            curves.append(found)
            print_curves(seed, found)
    table = rows(curves)
    code = finish(
        f"asynchronous sampling, tool calls of {options.median:g} s (log-normal)", table, quick=options.quick
    )
    if options.json is not None:
        plain: dict[str, Any] = {
            "rows": [row.plain() for row in table],
            "curves": [{mode: vars(curve) for mode, curve in each.items()} for each in curves],
        }
        options.json.write_text(json.dumps(plain, indent=2), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
