"""Train a game of several moves with and without step advantages, and compare how fast its score rises.

    python scripts/bench/credit.py [--seeds 3] [--minutes 15] [--work FOLDER] [--json FILE]
    python scripts/bench/credit.py --quick        one seed, one step, of a model without a warm-up

The game is FrozenLake, whose positions trajectories reach by different ways. Each seed makes and warms up a
model as learning.py does, and trains it twice from there: with --step_advantage off, and with gigpo. Both are
evaluated on held-out games after the same steps. The table has the mean score over these evaluations, which
is higher the earlier the score rises, and the first step with half of the games won. Exits with 1 unless the
mean of gigpo is higher over all seeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import demo_path  # noqa: F401
from commands import database
from harness import bench_parser
from learning import Result, run_seed
from learning_cases import CASES, Case, quick_case

ARMS: Mapping[str, tuple[str, ...]] = {
    "off": (),
    "gigpo": ("--step_advantage", "gigpo"),
}
"""What each arm adds to the flags of the case."""
EVALUATIONS = 10
WON = 0.5


def main() -> int:
    """Train every seed with every arm, print the table, and return 0 if step advantages are faster."""
    parser = bench_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of models (default: 3)")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit of each training (default: 15)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--work", type=Path, help="keep models, logs and database here; models are reused")
    given = parser.parse_args()
    case: Case = replace(CASES["frozen_lake"], evaluations=EVALUATIONS)
    if given.quick:
        given.seeds, case = 1, quick_case(case)
    results: dict[str, list[Result]] = {arm: [] for arm in ARMS}
    with database(given.work) as (work, _):
        for seed in range(given.seeds):
            for arm, flags in ARMS.items():
                print(f"--step_advantage {arm}:", flush=True)
                trained = run_seed(replace(case, flags=(*case.flags, *flags)), seed, given.minutes, work)
                results[arm].append(trained)
    print_table(results)
    if given.json is not None:
        found = {arm: [asdict(item) for item in items] for arm, items in results.items()}
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    off, gigpo = (fmean(map(mean_score, results[arm])) for arm in ARMS)
    return 0 if given.quick or gigpo > off else 1


def mean_score(result: Result) -> float:
    """Return the mean score of the evaluations after the first step."""
    return fmean(point.score for point in result.points[1:] or result.points)


def first_won(result: Result) -> str:
    """Return the first evaluated step at which half of the games are won."""
    return next((str(point.step) for point in result.points if point.score >= WON), "none")


def print_table(results: Mapping[str, Sequence[Result]]) -> None:
    """Print a Markdown table: a row per seed and arm, and one per arm for all seeds."""
    print("\n| seed | --step_advantage | mean score | score at the end | half won at step | training |")
    print("|---" * 6 + "|")
    for arm, items in results.items():
        for item in items:
            row = f"{mean_score(item):.3f} | {item.points[-1].score:.3f} | {first_won(item)}"
            print(f"| {item.seed} | {arm} | {row} | {item.seconds:.0f} s |")
        last = fmean(item.points[-1].score for item in items)
        print(f"| all | {arm} | {fmean(map(mean_score, items)):.3f} | {last:.3f} | | |")


if __name__ == "__main__":
    sys.exit(main())
