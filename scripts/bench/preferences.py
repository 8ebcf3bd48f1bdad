"""Train DPO and KTO on the stored groups of a short run, and test whether a held-out score rises.

    python scripts/bench/preferences.py [--seeds 3] [--losses DPO KTO] [--work FOLDER] [--json FILE]
    python scripts/bench/preferences.py --quick        one seed, two steps, no test

Each seed trains the tiny quickstart for a few steps with an engine and a sampler, and stops them. Then
`agentrl whatif --loss_calculater DPO` trains the stored groups from the first model on: no sample is new.
`agentrl eval` evaluates the first model and the trained ones on held-out sums. The tests are those of
`agentrl eval compare`: paired by task, per seed and over all seeds. Exits with 1 if a loss does not raise the
score with p < 0.01 over all seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import demo_path  # noqa: F401
from commands import agentrl, database, newest_version, train_run
from demo.tasks import QUESTION, tiny_expressions
from harness import bench_parser
from learning import Pairs, cells, paired, rises, scores

from agentrl.base.installation import shipped_files
from agentrl.config.schema import RunConfig
from agentrl.local.launch import SERVERS_FILE, demo_model
from agentrl.scoring.evaluation import difference
from agentrl.store.client import open_store

RECIPE = shipped_files() / "configs" / "quickstart-tiny.yml"
TASKS = shipped_files() / "tasks" / "tiny_train.jsonl"
HELD_OUT, HELD_OUT_SEED, SAMPLES = 96, 7701, 4
TRAIN_SECONDS = 900.0
FLAGS = ("--learning_rate", "1e-4")
"""What the losses change beside themselves."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One loss of one seed: the mean score of each held-out task before and after, and seconds."""

    loss: str
    seed: int
    pairs: Pairs
    trajectories: int
    """Stored trajectories of the parent's steps."""
    parent_seconds: float
    seconds: float


def main() -> int:
    """Run every seed, print the tests, and return 0 if each loss raises the score."""
    parser = bench_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of runs (default: 3)")
    parser.add_argument("--first_seed", type=int, default=0, help="seed of the first run (default: 0)")
    parser.add_argument("--losses", nargs="+", default=["DPO", "KTO"], help="losses (default: DPO KTO)")
    parser.add_argument("--steps", type=int, default=8, help="steps of the parent (default: 8)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--work", type=Path, help="keep logs, runs and database here")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.steps, given.losses = 1, 2, ["DPO"]
    with database(given.work) as (work, _):
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        results = [result for seed in seeds for result in run_seed(seed, given, work)]
    tests = [print_results(loss, [each for each in results if each.loss == loss]) for loss in given.losses]
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")
    return 0 if given.quick or all(tests) else 1


def run_seed(seed: int, given: argparse.Namespace, work: Path) -> Iterator[Result]:
    """Train the parent, stop it, and train its stored groups again with each loss."""
    stamp = time.time_ns() // 10**9
    parent = RunConfig(run_name=f"preferences-{seed}-{stamp}", mongo_dir=str(work / "mongo"))
    place = ["--mongo_dir", parent.mongo_dir, "--log_dir", str(work / "logs" / parent.run_name)]
    common = [
        *place, "--config", str(RECIPE), "--run_name", parent.run_name, "--seed", str(seed),
        "--model_name_or_path", str(demo_model(0)), "--train_file", str(TASKS),
        "--mcp_servers_file", str(SERVERS_FILE), "--output_dir", str(work / "output" / parent.run_name),
    ]  # fmt: skip
    began = time.monotonic()
    flags = {"serve": common, "sample": common, "train": [*common, "--max_steps", str(given.steps)]}
    train_run(flags, work / "logs" / parent.run_name, TRAIN_SECONDS)
    parent_seconds = time.monotonic() - began
    held_out = work / "held_out.jsonl"
    held_out.write_text("".join(f"{json.dumps(task)}\n" for task in held_out_tasks()), encoding="utf-8")
    asked = ["--eval_file", str(held_out), "--eval_samples", str(SAMPLES), "--eval_engine", "own"]
    before = evaluate(common, asked, work, parent, version=0)
    trajectories = asyncio.run(stored(parent))
    for loss in given.losses:
        child = RunConfig(run_name=f"{parent.run_name}-{loss.lower()}", mongo_dir=parent.mongo_dir)
        output = ["--output_dir", str(work / "output" / child.run_name)]
        began = time.monotonic()
        agentrl("whatif", [
            parent.run_name, child.run_name, *place, *output, "--loss_calculater", loss, *FLAGS,
        ], work)  # fmt: skip
        seconds = time.monotonic() - began
        named = ["--run_name", child.run_name, *output]
        after = evaluate([*common, *named], asked, work, child, version=None)
        pairs = paired(before, after)
        yield Result(
            loss=loss, seed=seed, pairs=pairs, trajectories=trajectories, parent_seconds=parent_seconds,
            seconds=seconds,
        )  # fmt: skip
        test = difference(pairs)
        print(f"{loss}, seed {seed}: {test.a:.3f} -> {test.b:.3f}, {seconds:.0f} s", flush=True)


def held_out_tasks() -> Iterator[dict[str, Any]]:
    """Yield sums that no training task asks for."""
    known = {json.loads(line)["query"] for line in TASKS.read_text(encoding="utf-8").splitlines()}
    example = json.loads(TASKS.read_text(encoding="utf-8").partition("\n")[0])
    new = (text for text in tiny_expressions(HELD_OUT_SEED) if QUESTION.format(text) not in known)
    for number, text in enumerate(islice(dict.fromkeys(islice(new, 4 * HELD_OUT)), HELD_OUT)):
        left, right = text.split(" + ")
        asked = {"id": f"held-{number:03d}", "query": QUESTION.format(text)}
        yield {**example, **asked, "answer": str(int(left) + int(right))}


def evaluate(
    flags: Sequence[str], asked: Sequence[str], work: Path, run: RunConfig, *, version: int | None
) -> dict[str, float]:
    """Return the mean score of each held-out task by a version of a run; None: the newest."""

    async def read() -> dict[str, float]:
        async with await open_store(run) as store:
            found = [item for item in await store.evaluations.all() if item.results is not None]
            return dict(await scores(store, found[-1].id, set()))

    number = asyncio.run(newest_version(run)) if version is None else version
    agentrl("eval", [*flags, *asked, "--eval_version", str(number)], work)
    return asyncio.run(read())


async def stored(run: RunConfig) -> int:
    """Return how many trajectories the steps of a run have trained."""
    async with await open_store(run) as store:
        return sum(len(step.data) for step in await store.steps.find())


def print_results(loss: str, results: Sequence[Result]) -> bool:
    """Print a Markdown table of a loss: a row per seed, and one for all; return whether the score rises."""
    print(f"\n| {loss}: seed | tasks | before | after | difference [95 %] | p | stored | sampled | trained |")
    print("|---" * 9 + "|")
    for item in results:
        times = f"{item.trajectories} | {item.parent_seconds:.0f} s | {item.seconds:.0f} s"
        print(f"| {item.seed} | {cells(item.pairs)} | {times} |")
    every = [pair for item in results for pair in item.pairs]
    print(f"| all | {cells(every)} | | | |")
    return rises(every)


if __name__ == "__main__":
    sys.exit(main())
