"""Measure whether blame finds wrong scores: poison 2 % of a tiny run, rank, train again without the worst.

    OMP_NUM_THREADS=1 python scripts/bench/blame.py [--seeds 0 1 2] [--steps 24]
    OMP_NUM_THREADS=1 python scripts/bench/blame.py --quick

One of two scorers returns 1 − score, for 2 % of the groups. A run is that of ``poisoned_run.py``: 128
trajectories a step, on-policy. It is evaluated before the first and after the last step. ``agentrl blame``
ranks its trajectories, and ``agentrl whatif --without`` trains its steps again without the first 5 %; as a
control, without all that have wrong scores. Prints, for each seed, the share of the wrong scores among the
first 5 %, and pass@1 on the held-out questions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from commands import agentrl, database
from harness import Row, bench_parser, finish
from poisoned_run import PoisonedRun, Sizes, make_model
from store_fixtures import run_database

from agentrl.config.schema import RunConfig
from agentrl.documents.run import Evaluation
from agentrl.store.client import open_store

QUICK = Sizes(warm_up=10, steps=2, groups=4, generations=4, samples=2)
FOUND, RESTORED = 0.8, 0.8
"""Smallest share of the wrong scores that is found, and of the loss of pass@1 that is won back."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One seed: pass@1 of four policies, and what blame found."""

    seed: int
    trajectories: int
    poisoned: int
    blamed: int
    found: int
    """Poisoned trajectories among the blamed."""
    before: float
    after: float
    without: float
    control: float | None
    """Without all poisoned trajectories."""
    blame_seconds: float

    @property
    def rows(self) -> list[Row]:
        """What is printed."""
        label, share = f"seed {self.seed}", self.found / max(1, self.poisoned)
        rows = [
            Row(
                what=f"{label}: wrong scores among the {self.blamed} blamed of {self.trajectories}",
                ours=str(self.found), baseline=str(self.poisoned), ratio=share, target=FOUND,
            )
        ]  # fmt: skip
        if self.control is not None:
            lost = self.control - self.after
            back = (self.without - self.after) / lost if lost > 0 else None
            rows.append(
                Row(
                    what=f"{label}: pass@1 {self.before:.3f} → {self.after:.3f}; without the blamed, control",
                    ours=f"{self.without:.3f}", baseline=f"{self.control:.3f}", ratio=back,
                    target=RESTORED,
                )
            )  # fmt: skip
        return rows


async def measure(folder: Path, uri: str, seed: int, sizes: Sizes, *, controls: bool) -> Result:
    """Make the runs of one seed, and measure."""
    model = make_model(folder / "model", seed, sizes.warm_up)
    async with run_database(uri, "poisoned") as store:
        run = PoisonedRun(store, uri, folder, model, sizes, seed)
        await run.run()
        a, b = await run.evaluate(0), await run.evaluate(sizes.steps)
        out, wrong, started = folder / "blamed.txt", folder / "wrong.txt", time.perf_counter()
        more = ("--out", str(out), "--csv", str(folder / "effects.csv"), "--label", "blamed", "--limit", "5")
        words = [store.run_name, a.id, b.id, *run.flags(), *more]
        await asyncio.to_thread(agentrl, "blame", words, folder)
        seconds = time.perf_counter() - started
        wrong.write_text("\n".join(run.poisoned), encoding="utf-8")
        blamed = out.read_text(encoding="utf-8").split()
        without = await train_without(run, out)
        control = await train_without(run, wrong) if controls else None
        trained = sum([len(step.data) for step in await store.steps.find()])
    return Result(
        seed=seed, trajectories=trained, poisoned=len(run.poisoned), blamed=len(blamed),
        found=len(run.poisoned.intersection(blamed)), before=pass_at_1(a), after=pass_at_1(b),
        without=without, control=control, blame_seconds=seconds,
    )  # fmt: skip


async def train_without(run: PoisonedRun, ids: Path) -> float:
    """Train the steps of ``run`` again without the Records in a file; return pass@1 after the last one."""
    child = f"{run.store.run_name}_{ids.stem}"
    words = [
        run.store.run_name, child, "--without", str(ids), "--db_connection_string", run.uri,
        "--output_dir", str(run.folder / child), "--log_dir", str(run.folder / "logs"),
    ]  # fmt: skip
    await asyncio.to_thread(agentrl, "whatif", words, run.folder)
    async with await open_store(RunConfig(run_name=child, db_connection_string=run.uri)) as store:
        return pass_at_1(await replace(run, store=store).evaluate(run.sizes.steps))


def pass_at_1(evaluation: Evaluation) -> float:
    """Return pass@1 of a finished evaluation."""
    return float(evaluation.total["pass_at"]["1"]["value"])


async def run(options: argparse.Namespace) -> list[Result]:
    """Measure every seed on one server."""
    results = []
    sizes = QUICK if options.quick else Sizes(steps=options.steps)
    with database() as (scratch, uri):
        for seed in options.seeds:
            folder = scratch / str(seed)
            folder.mkdir()
            result = await measure(folder, uri, seed, sizes, controls=not options.quick)
            print(json.dumps(asdict(result)), flush=True)
            results.append(result)
    return results


def main() -> int:
    """Print a table; 1 if a target is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=Sizes.steps)
    options = parser.parse_args()
    if options.quick:
        options.seeds = [0]
    torch.set_num_threads(1)
    rows = [row for result in asyncio.run(run(options)) for row in result.rows]
    return finish("blame", rows, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
