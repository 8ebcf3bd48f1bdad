"""Train a small model on an environment, and test whether its score on held-out tasks rises.

    python scripts/bench/learning.py --case gcd [--seeds 3] [--minutes 15] [--plot FILE] [--json FILE]
    python scripts/bench/learning.py --case frozen_lake
    python scripts/bench/learning.py --case sandbox
    python scripts/bench/learning.py --case openenv         after `bash scripts/setup_openenv.sh`
    python scripts/bench/learning.py --case reverse_words   SmolLM2-135M
    python scripts/bench/learning.py --quick        one step, of a model without a warm-up

Each seed makes a two-layer model and warms it up, or takes a pretrained one (learning_cases.py), and trains
it with an engine, a sampler and a trainer of its own, for --minutes at most. Then `agentrl eval` evaluates
the version before the first step, versions in between and the last one on held-out tasks of the environment;
those whose text is that of a training task do not count. The paired tests are those of `agentrl eval
compare`: per seed, and over all seeds. Exits with 1 if the score does not rise with p < 0.01 over all seeds.

--export keeps the runs as archives, which `agentrl db import` opens. Seeds may train in processes of their
own, each with --first_seed, --seeds 1, --work and --json; --results makes the table and the plot of them all.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import demo_path  # noqa: F401
from commands import agentrl, database, newest_version, server, train_run
from demo import smollm
from demo.tiny import build_tiny_model
from harness import bench_parser
from learning_cases import CASES, Case, corpus, quick_case

from agentrl.config.schema import RunConfig
from agentrl.observe.plotting import COLORS, finish, label_steps, new_figure, save_figure
from agentrl.scoring.evaluation import Difference, EvaluatedTask, difference
from agentrl.store.client import Store, open_store

SIGNIFICANT = 0.01
HELD_OUT_SEED = 77
BATCH_SIZE = 16
SAMPLES = 4
"""Trajectories of each held-out task in an evaluation."""

Pairs = list[tuple[float, float]]
"""The mean score of each held-out task before and after."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The evaluation of one version."""

    step: int
    score: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """One seed: its evaluations by step, and the scores of the first and the last."""

    seed: int
    seconds: float
    points: list[Point]
    pairs: Pairs


def main() -> int:
    """Train and evaluate every seed, print the tests, and write the plot."""
    parser = bench_parser(__doc__)
    parser.add_argument("--case", choices=CASES, help="the environment")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs (default: 3)")
    parser.add_argument("--first_seed", type=int, default=0, help="seed of the first run (default: 0)")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit of each training (default: 15)")
    parser.add_argument("--plot", type=Path, help="write the plot to this file")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--export", type=Path, help="export each run into this folder, as CASE-SEED")
    parser.add_argument(
        "--results", type=Path, nargs="+", help="train nothing: print and plot what these --json files have"
    )
    parser.add_argument(
        "--work", type=Path, help="keep models, logs and database here; made models are reused"
    )
    given = parser.parse_args()
    if given.quick:
        given.seeds = 1
    elif given.case is None:
        parser.error("--case is missing: " + " or ".join(CASES))
    case: Case = quick_case(CASES[given.case or "gcd"]) if given.quick else CASES[given.case]
    if given.results is not None:
        results = [result for file in given.results for result in read_results(file)]
    else:
        environment = server(case.server, int(case.server[-1])) if case.server else nullcontext()
        with database(given.work) as (work, _), environment:
            seeds = range(given.first_seed, given.first_seed + given.seeds)
            results = [run_seed(case, seed, given.minutes, work, given.export) for seed in seeds]
    every = [pair for result in results for pair in result.pairs]
    print_results(results, every)
    overall = difference(every)
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(case, results, overall), indent=1), encoding="utf-8")
    if given.plot is not None:
        plot(case, results, overall, given.plot)
    return 0 if given.quick or rises(every) else 1


def run_seed(case: Case, seed: int, minutes: float, work: Path, export: Path | None = None) -> Result:
    """Make the model, train it, evaluate its versions, and export the run below ``export``."""
    model = prepare_model(case, seed, work)
    run = RunConfig(
        run_name=f"{case.name}-{seed}-{time.time_ns() // 10**9}", mongo_dir=str(work / "mongo"),
        log_dir=str(work / "logs" / f"{case.name}-{seed}"),
    )  # fmt: skip
    output = str(work / "output" / run.run_name)
    common = [
        "--run_name", run.run_name, "--mongo_dir", run.mongo_dir, "--log_dir", run.log_dir,
        "--seed", str(seed), "--model_name_or_path", str(model), "--output_dir", output, *case.flags,
    ]  # fmt: skip
    began = time.monotonic()
    every = max(1, case.steps // case.evaluations)
    flags = {
        "serve": common,
        "sample": [*common, "--train_file", case.address(case.training_tasks, 1)],
        "train": [*common, "--max_steps", str(case.steps), "--save_steps", str(10 * case.steps),
                  "--publish_steps", "1", "--keep_every", str(every)],
    }  # fmt: skip
    train_run(flags, Path(run.log_dir), 60 * minutes)
    seconds = time.monotonic() - began
    held_out = ["--eval_file", case.address(case.held_out, HELD_OUT_SEED), "--eval_samples", str(SAMPLES)]
    agentrl("eval", [*common, *held_out, "--eval_steps", str(every), "--idle_exit_seconds", "1"], work)
    last = asyncio.run(newest_version(run))
    if case.steps > 1:
        agentrl("eval", [*common, *held_out, "--eval_engine", "own", "--eval_version", str(last)], work)
    result = asyncio.run(read(run, seed, seconds))
    print(f"seed {seed}: {result.points[0].score:.3f} -> {result.points[-1].score:.3f} after"
          f" {result.points[-1].step} steps, {seconds:.0f} s of training", flush=True)  # fmt: skip
    if export is not None:
        where = ("--run_name", run.run_name, "--mongo_dir", run.mongo_dir)
        first = result.points[-1].step + 1 - case.exported_steps
        if first > 1:
            agentrl("db", ["prune", "--before_step", str(first), "--output_dir", output, *where], work)
        agentrl("db", ["export", str(export / f"{case.name}-{seed}"), "--compress", *where], work)
    return result


def prepare_model(case: Case, seed: int, work: Path) -> Path:
    """Return the folder of the pretrained, or of a seed's warmed-up model; make it if it is missing."""
    if case.model is not None:
        smollm.main(case.model)
        return case.model
    folder = work / "models" / f"{case.name}-{seed}"
    if (folder / "config.json").is_file():
        return folder
    if not case.warm_up_steps:
        build_tiny_model(folder, seed, corpus=corpus(case, seed), whole_numbers=case.whole_numbers)
        return folder
    began = time.monotonic()
    random_model = work / "models" / f"{case.name}-{seed}-random"
    build_tiny_model(
        random_model, seed, corpus=corpus(case, seed), whole_numbers=case.whole_numbers,
        context_tokens=case.context_tokens,
    )  # fmt: skip
    file = work / f"warm-up-{case.name}-{seed}.jsonl"
    items = islice(case.conversations(seed), case.warm_up_steps * BATCH_SIZE)
    file.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
    agentrl("sft", [
        "--run_name", "warm-up", "--seed", str(seed), "--max_steps", str(case.warm_up_steps), "--batch_size",
        str(BATCH_SIZE), "--max_tokens", "2048", "--learning_rate", "2e-3", "--lr_scheduler_type", "linear",
        "--warmup_steps", "5", "--model_name_or_path", str(random_model), "--train_file", str(file),
        "--output_dir", str(folder), "--log_dir", str(work / "logs"),
    ], work)  # fmt: skip
    print(f"seed {seed}: warm-up of {case.warm_up_steps} steps, {time.monotonic() - began:.0f} s", flush=True)
    return folder


async def read(run: RunConfig, seed: int, seconds: float) -> Result:
    """Read the evaluations of a run."""
    async with await open_store(run) as store:
        found = [item for item in await store.evaluations.all() if item.results is not None]
        found.sort(key=lambda item: item.step or 0)
        points = []
        for item in found:
            found_score = (item.results or {})["total"]["score"]
            score, low, high = (found_score[name] for name in ("value", "low", "high"))
            points.append(Point(step=item.step or 0, score=score, low=low, high=high))
        trained = {task.query for task in await store.tasks.find("train")}
        before, after = [await scores(store, item.id, trained) for item in (found[0], found[-1])]
    return Result(seed=seed, seconds=seconds, points=points, pairs=paired(before, after))


async def scores(store: Store, split: str, without: set[str]) -> Mapping[str, float]:
    """Return the mean score of each task of an evaluation whose question is not in ``without``."""
    questions = {task.task_id: task.query for task in await store.tasks.find(split)}
    tasks: Sequence[EvaluatedTask] = await store.evaluations.tasks(split, "single_turn", 0.5)
    return {
        task.task_id: fmean(task.scores)
        for task in tasks
        if task.scores and questions[task.task_id] not in without
    }


def paired(before: Mapping[str, float], after: Mapping[str, float]) -> Pairs:
    """Return the scores before and after of the tasks that both have."""
    return [(before[key], after[key]) for key in sorted(before.keys() & after.keys())]


def rises(pairs: Pairs) -> bool:
    """Return whether the score rises significantly."""
    test = difference(pairs)
    return bool(test.effect.value > 0 and test.p_permutation < SIGNIFICANT)


def print_results(results: Sequence[Result], every: Pairs) -> None:
    """Print a Markdown table: a row per seed, and one for all."""
    print("\n| seed | held-out tasks | before | after | difference [95 %] | p | steps | training |")
    print("|---" * 8 + "|")
    for result in results:
        print(
            f"| {result.seed} | {cells(result.pairs)} | {result.points[-1].step} | {result.seconds:.0f} s |"
        )
    print(f"| all | {cells(every)} | | |")


def cells(pairs: Pairs) -> str:
    """Return the cells of a table: tasks, score before and after, difference with its interval, and p."""
    test = difference(pairs)
    effect = f"{test.effect.value:+.3f} [{test.effect.low:+.3f}, {test.effect.high:+.3f}]"
    return f"{len(pairs)} | {test.a:.3f} | {test.b:.3f} | {effect} | {test.p_permutation:.4f}"


def as_json(case: Case, results: Sequence[Result], overall: Difference) -> dict[str, Any]:
    """Return all results as JSON."""
    seeds = [{**asdict(item), "test": asdict(difference(item.pairs))} for item in results]
    return {"case": case.name, "seeds": seeds, "overall": asdict(overall)}


def read_results(file: Path) -> list[Result]:
    """Return the results of a file that ``as_json`` made."""
    return [
        Result(
            seed=item["seed"], seconds=item["seconds"], points=[Point(**point) for point in item["points"]],
            pairs=[(before, after) for before, after in item["pairs"]],
        )
        for item in json.loads(file.read_text(encoding="utf-8"))["seeds"]
    ]  # fmt: skip


def plot(case: Case, results: Sequence[Result], overall: Difference, out: Path) -> None:
    """Plot the held-out score of each seed over the optimizer steps, with its interval."""
    figure = new_figure(7.0, 3.8)
    axes = figure.subplots()
    for result, color in zip(results, COLORS * len(results), strict=False):
        steps = [point.step for point in result.points]
        axes.plot(steps, [point.score for point in result.points], marker="o", markersize=4, color=color,
                  label=f"seed {result.seed}")  # fmt: skip
        low, high = [point.low for point in result.points], [point.high for point in result.points]
        axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axes.set_title(
        f"{case.name}: held-out score {overall.a:.3f} → {overall.b:.3f}, p = {overall.p_permutation:.4f}",
        loc="left", fontsize=10,
    )  # fmt: skip
    axes.set_ylabel("score of held-out tasks")
    label_steps(axes)
    finish(axes)
    save_figure(figure, out, "--plot")


if __name__ == "__main__":
    sys.exit(main())
