"""Compare ``--target_concurrency auto`` with the best fixed number of trajectories, on a simulated engine.

    python scripts/bench/target_concurrency.py [--quick] [--only NAME …] [--hours H]

The engine and its load are ``tests/simulated_engine.py``. A sampler begins with 16 trajectories at a time.
The best number is that of the most tokens/s of the same load and time, of numbers 10 % apart. Both are
measured after half an hour. Exits with 1 if a mean is below its target.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from harness import Row, bench_parser, finish

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from simulated_engine import Engine, Load, run

from agentrl.rollout.target_concurrency import TargetConcurrency

TARGET = 0.97
START, AFTER = 16, 1800.0

Case = tuple[Callable[[], Engine], Callable[[int], Load], int]
"""Make the engine; make the load of a seed; about the best number."""

CASES: dict[str, Case] = {
    "contexts fill the KV cache": (Engine, lambda seed: Load(seed=seed), 90),
    "tools of 25 s": (Engine, lambda seed: Load(seed=seed, tool_seconds=25), 100),
    "short contexts, slow steps": (
        lambda: Engine(capacity=400_000, base=0.01, per_request=1e-3, per_token=1e-8),
        lambda seed: Load(seed=seed, turns=2, prompt=200, result=50, tool_seconds=3),
        300,
    ),
    "a small KV cache": (
        lambda: Engine(capacity=100_000, per_request=5e-4, per_token=2e-7, prefill=8000),
        lambda seed: Load(seed=seed, turns=4, prompt=500, result=200),
        32,
    ),
    "at most 64 requests": (
        lambda: Engine(capacity=800_000, per_request=2e-4, most=64),
        lambda seed: Load(seed=seed, turns=4, prompt=300, result=50, tool_seconds=5),
        95,
    ),
}


def best(case: Case, seed: int, seconds: float) -> tuple[float, int]:
    """Return the most tokens/s of a fixed number, and that number."""
    engine, load, near = case
    numbers = [round(near * factor) for factor in (0.8, 0.9, 1.0, 1.1)]
    return max((run(engine(), load(seed), [number], seconds, after=AFTER), number) for number in numbers)


def measure(name: str, case: Case, seeds: list[int], seconds: float) -> Row:
    """Return the row of one case: the mean over ``seeds``."""
    engine, load, _ = case
    targets = [TargetConcurrency(START, 10**6) for _ in seeds]
    found = [run(engine(), load(seed), [targets[seed]], seconds, after=AFTER) for seed in seeds]
    fixed = [best(case, seed, seconds) for seed in seeds]
    ratios = [ours / rate for ours, (rate, _) in zip(found, fixed, strict=True)]
    return Row(
        what=f"{name} ({min(ratios):.2f} to {max(ratios):.2f})",
        ours=f"{fmean(found):,.0f} tokens/s, {targets[-1].number} at the end",
        baseline=f"{fmean(rate for rate, _ in fixed):,.0f} tokens/s, {fixed[-1][1]}",
        ratio=fmean(ratios),
        target=TARGET,
    )


def main() -> int:
    """Measure the cases."""
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="cases")
    parser.add_argument("--hours", type=float, default=2.5, help="simulated hours of each run")
    arguments = parser.parse_args()
    seeds = [0] if arguments.quick else [0, 1, 2]
    rows = [measure(name, CASES[name], seeds, 3600 * arguments.hours) for name in arguments.only]
    return finish("target_concurrency", rows, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
