"""Measure how costs grow with tasks, stored trajectories, tokens, samplers and turns: log-log slopes.

    python scripts/bench/growth.py [--quick] [--most N] [--only NAME ...] [--json FILE]

``tasks``: loading, claims and housekeeping with 10,000 to 1,000,000 tasks; ``stored``: a step of the trainer,
a group, screens and the check of a run with 1,000 to 100,000 stored trajectories; ``tokens``: a turn of the
sampler and the micro-batches of a step at contexts of 1,000 to 100,000 tokens; ``samplers``: 10 to 1,000
samplers; ``turns``: a turn of trajectories of 10 to 300 turns. CPU is that of mongod and of the clients.
Figures are costs of one thing (a claim, a turn, 1,000 tasks), so that the slope is 0 if it does not grow;
"looked at" counts the documents and index keys that the database examined, and its commands. With
AGENTRL_BENCH_PLANS=1 their plans are printed. Exits with 1 if a slope exceeds its bound. The database takes
up to 6 GB of disk, in a temporary folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from commands import database
from growth_run import STEP_GROUPS, STEP_SIZE, finalizer, make_run, train_step
from harness import Row, bench_parser, finish
from rollout import Workload, make_model, measure
from store_fixtures import SPLIT, make_data, run_database, text
from store_scale import OURS, many_samplers

from agentrl.config.schema import ClaimConfig, TaskConfig
from agentrl.data.finalize_group import explain_difference
from agentrl.data.planner import build_micro_batches
from agentrl.data.stream import DataStream, Freshness, StreamSettings
from agentrl.lab.check.checks import Checks
from agentrl.lab.check.reading import CheckOptions
from agentrl.rollout.housekeeping import EpochPlan, Housekeeping
from agentrl.rollout.load_tasks import read_source, store_tasks
from agentrl.screens.snapshot import SnapshotReader
from agentrl.store.client import Store
from agentrl.store.epochs import Selection

Json = dict[str, Any]
Operation = Callable[[], Awaitable[object]]
Costs = dict[str, float]
_FLAT, _SOME = 0.2, 0.35
"""Largest slopes: of what costs the same at any size, and of what may grow like a tree or a cache."""
_MIB = 2**20
_PROFILE_BYTES = 256 * _MIB
_VOCABULARY = 151_936
_MANY_GROUPS = 1_000_000


@dataclass(frozen=True)
class Growth:
    """What a measurement costs at each size; ``bounds`` are largest slopes by the name of a figure."""

    sizes: Sequence[int]
    costs: Sequence[Costs]
    bounds: dict[str, float]

    def rows(self, what: str) -> list[Row]:
        """Return a row for each figure: its values, and its slope as a ratio to no baseline."""
        rows = []
        for name, bound in self.bounds.items():
            values = [cost[name] for cost in self.costs]
            logs = np.log(np.maximum(values, 1e-9))
            slope = float(np.polyfit(np.log(self.sizes), logs, 1)[0])
            sizes = "/".join(f"{size:,}" for size in self.sizes)
            shown = " / ".join(f"{value:.3g}" for value in values)
            rows.append(
                Row(what=f"{name}, {sizes} {what}", ours=shown, baseline="–", ratio=slope, target=bound,
                    more=False)
            )  # fmt: skip
        return rows


class Meter:
    """Reads CPU seconds of mongod and of this process, and what the database looked at."""

    def __init__(self, store: Store, mongod: psutil.Process) -> None:
        self._store = store
        self._mongod = mongod

    @classmethod
    async def of(cls, store: Store) -> Meter:
        """Return a meter of the server of ``store``."""
        status = await store.database.client.admin.command("serverStatus")
        return cls(store, psutil.Process(status["pid"]))

    def cpu(self) -> float:
        """Return the CPU seconds of mongod and of this process."""
        return self.mongod_cpu() + time.process_time()

    def mongod_cpu(self) -> float:
        """Return the CPU seconds of mongod."""
        used = self._mongod.cpu_times()
        return float(used.user + used.system)

    async def cost(self, name: str, operation: Operation, repeats: int, *, per: float = 1.0) -> Costs:
        """Return the CPU ms of one of ``repeats`` operations on ``per`` things, and what it looked at."""
        await operation()  # warms caches, plans of queries among them
        begun = self.cpu()
        for _ in range(repeats):
            await operation()
        milliseconds = 1000 * (self.cpu() - begun) / repeats / per
        return {f"{name}: ms of CPU": milliseconds, f"{name}: looked at": await self._seen(operation) / per}

    async def _seen(self, operation: Operation) -> float:
        """Return the documents and index keys that one operation examines, and its commands."""
        await self._store.database.create_collection("system.profile", capped=True, size=_PROFILE_BYTES)
        await self._store.database.command("profile", 2)
        await operation()
        await self._store.database.command("profile", 0)
        profile = self._store.database["system.profile"]
        seen = 0
        async for entry in profile.find({"ns": {"$not": {"$regex": "system.profile"}}}):
            seen += 1 + entry.get("docsExamined", 0) + entry.get("keysExamined", 0)
            if os.environ.get("AGENTRL_BENCH_PLANS"):
                fields = ("op", "ns", "planSummary", "docsExamined", "keysExamined", "hasSortStage", "millis")
                shown = {field: entry[field] for field in fields if field in entry}
                print(json.dumps(shown), str(entry.get("command"))[:400], file=sys.stderr)
        await profile.drop()
        return seen


async def _tasks(uri: str, most: int, work: Path) -> list[Row]:
    """Measure loading, claims and shared background work at each number of tasks."""
    sizes = (10_000, 100_000, 1_000_000)[:most] or (100, 1000)
    return Growth(
        sizes,
        [await _with_tasks(uri, size, 100 if most else 4, work) for size in sizes],
        {
            "load 1,000 tasks: ms of CPU": _FLAT, "load: MiB": _SOME, "load again 1,000: ms of CPU": _FLAT,
            "a claim: ms of CPU": _FLAT, "a claim: looked at": _FLAT,
            "a claim by pass rate: ms of CPU": _FLAT, "a claim by pass rate: looked at": _FLAT,
            "a claim by level: ms of CPU": _FLAT, "a claim by level: looked at": _FLAT,
            "housekeeping: ms of CPU": _FLAT, "housekeeping: looked at": _FLAT,
            "status: ms of CPU": 1.0,
        },
    ).rows("tasks")  # fmt: skip


async def _with_tasks(uri: str, size: int, repeats: int, work: Path) -> Costs:
    file, rng = work / f"{size}.jsonl", random.Random(size)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(size):
            task = {"id": f"q{number:07d}", "query": text(rng, 60), "answer": "1889", "scorer": "exact"}
            task["meta"] = {"level": 10 * number // size}
            lines.write(json.dumps(task) + "\n")
    async with run_database(uri, "growth") as store:
        meter = await Meter.of(store)
        loaded, peak = await _load(meter, store, file)
        again, _ = await _load(meter, store, file)
        file.unlink()
        costs: Costs = {
            "load 1,000 tasks: ms of CPU": loaded,
            "load: MiB": peak,
            "load again 1,000: ms of CPU": again,
        }

        async def claim(selection: Selection | None = None) -> None:
            claimed = await store.claims.claim(
                split=SPLIT, owner="bench", lease_seconds=3600.0, max_groups_open=_MANY_GROUPS,
                selection=selection,
            )  # fmt: skip
            assert claimed is not None

        costs |= await meter.cost("a claim", claim, 4 * repeats)
        costs |= await meter.cost("a claim by pass rate", lambda: claim(Selection(epochs=2)), 4 * repeats)
        levels = Selection(epochs=2, by_level=True)
        costs |= await meter.cost("a claim by level", lambda: claim(levels), 4 * repeats)
        costs |= await meter.cost("housekeeping", _housekeeping(store, 2), repeats // 4)
        return costs | await meter.cost("status", lambda: SnapshotReader(store).read(), repeats // 4)


async def _load(meter: Meter, store: Store, file: Path) -> tuple[float, float]:
    """Load a file as ``agentrl tasks load`` does; return the CPU ms of 1,000 tasks and the MiB it took."""
    process, begun = psutil.Process(), meter.cpu()
    resident = process.memory_info().rss
    source = await read_source(str(file), TaskConfig(), split=SPLIT, seed=0)
    loaded, _ = await store_tasks(store, source, append=True)
    used = 1e6 * (meter.cpu() - begun) / (loaded.inserted + loaded.existing)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return used, max(peak - resident, 0) / _MIB


def _housekeeping(store: Store, epochs: int) -> Operation:
    """Return a round of the background work of a sampler that finds nothing to do."""
    plan = EpochPlan(epochs=epochs, seed=0, num_generations=8, shuffle=True)
    own = finalizer(store)
    work = Housekeeping(store, own, plan, split=SPLIT, claims=ClaimConfig(), made_work=lambda: None)

    async def round_() -> None:
        await store.expired_leases.reap(SPLIT)
        await own.run_waiting(60.0)
        await work.nothing_is_left()
        await work.open_next_epoch()
        await store.groups.oldest_version(SPLIT)

    return round_


async def _stored(uri: str, most: int, work: Path) -> list[Row]:
    """Measure a trainer, a finalizer, screens and the check at each number of stored trajectories."""
    sizes = (1024, 10_240, 102_400)[:most] or (2 * STEP_SIZE, 8 * STEP_SIZE)
    return Growth(
        sizes,
        [await _with_trajectories(uri, size, 10 if most else 2) for size in sizes],
        {
            "a step: ms of CPU": _FLAT, "a step: looked at": _FLAT,
            "a group finalized: ms of CPU": _FLAT, "a group finalized: looked at": _FLAT,
            "housekeeping: ms of CPU": _FLAT, "housekeeping: looked at": _FLAT,
            "status: ms of CPU": _SOME, "status: looked at": 1.0,
            "check of a trajectory: ms of CPU": _FLAT, "check of a trajectory: looked at": _FLAT,
        },
    ).rows("trajectories")  # fmt: skip


async def _with_trajectories(uri: str, size: int, repeats: int) -> Costs:
    async with run_database(uri, "growth") as store:
        await make_run(store, size, (repeats + 4) * STEP_GROUPS, 4 * repeats)
        meter = await Meter.of(store)
        stream = DataStream(
            store,
            StreamSettings(
                groups_per_step=STEP_GROUPS, num_epochs=1, freshness=Freshness(max_staleness=_MANY_GROUPS),
                wait_seconds=60.0,
            ),
        )  # fmt: skip
        step = size // STEP_SIZE

        async def train() -> None:
            nonlocal step
            step += 1
            batch = await stream.take(step)
            assert batch is not None
            window = await stream.window(batch)
            await train_step(store, step, [item.id for item in batch.data], window.tasks)
            await stream.report(step, batch, window)

        waiting = await store.groups.waiting(SPLIT, limit=4 * repeats)
        own = finalizer(store)

        async def finalize() -> None:
            assert await own.finalize(waiting.pop())

        async def check() -> None:
            options = CheckOptions(compare_tokens=explain_difference, settle_seconds=0.0)
            report = await Checks(store.connection).run(options)
            if report.violations:
                raise SystemExit("\n".join(list(report.lines())[:40]))

        costs = await meter.cost("a step", train, repeats)
        costs |= await meter.cost("a group finalized", finalize, 3 * repeats)
        costs |= await meter.cost("housekeeping", _housekeeping(store, 1), 4 * repeats)
        costs |= await meter.cost("status", lambda: SnapshotReader(store).read(), 4 * repeats)
        return costs | await meter.cost("check of a trajectory", check, 1, per=size)


async def _tokens(uri: str, most: int, work: Path) -> list[Row]:
    """Measure a turn of the sampler, and the micro-batches of a group, at each length of context."""
    sizes = (1000, 10_000, 100_000)[:most] or (200, 1000)
    model, costs = make_model(work), []
    for size in sizes:
        load = Workload(size, groups=4 if most else 1, concurrency=32, turns=10 if most else 2)
        found = await asyncio.to_thread(measure, uri, model, load)
        data = [make_data(f"r{seed}", "t", tokens=size, seed=seed) for seed in range(8)]
        begun, repeats = time.process_time(), max(1, 300_000 // size) if most else 4
        for _ in range(repeats):
            build_micro_batches(data, 9 * size, vocab_size=_VOCABULARY)
        spent = (time.process_time() - begun) / repeats
        costs.append(
            {
                "a turn: ms of CPU": 1000 * found["cpu"] / found["turns"],
                "a turn, 1,000 tokens of its context: ms of CPU": 1e6 * found["cpu"] / found["turns"] / size,
                "micro-batches, 1,000 tokens: ms of CPU": 1e6 * spent / (8 * size),
            }
        )
    bounds = {
        "a turn: ms of CPU": 1.0, "a turn, 1,000 tokens of its context: ms of CPU": 0.0,
        "micro-batches, 1,000 tokens: ms of CPU": 0.0,
    }  # fmt: skip
    return Growth(sizes, costs, bounds).rows("tokens")


async def _samplers(uri: str, most: int, work: Path) -> list[Row]:
    """Measure samplers with a client each, whose trajectories take two minutes, which two cores can bear."""
    sizes = (10, 100, 1000)[:most] or (4, 8)
    lasting, seconds = (120.0, 120.0) if most else (0.3, 1.0)
    costs = []
    for size in sizes:
        found = await many_samplers(uri, OURS, size, lasting, seconds, min(lasting, 60.0))
        per_trajectory = found["trajectories/s"] or float("nan")
        found["mongod's ms of CPU a trajectory"] = 10 * found["% of a core, mongod"] / per_trajectory
        costs.append(found)
    bounds = {
        "commands a trajectory": _FLAT, "mongod's ms of CPU a trajectory": _FLAT, "ms, claim p99": _SOME,
        "trajectories/s": 1.1,
    }  # fmt: skip
    return Growth(sizes, costs, bounds).rows("samplers")


async def _turns(uri: str, most: int, work: Path) -> list[Row]:
    """Measure a turn of trajectories of many turns; each adds some 530 tokens to the context."""
    sizes, model, costs = (10, 100, 300)[:most] or (2, 8), make_model(work), []
    for size in sizes:
        load = Workload(300, groups=max(1, 16 // size) if most else 1, concurrency=8, turns=size)
        found = await asyncio.to_thread(measure, uri, model, load)
        costs.append(
            {
                "a turn: ms of CPU": 1000 * found["cpu"] / found["turns"],
                "commands a turn": found["commands"] / size,
            }
        )
    return Growth(sizes, costs, {"a turn: ms of CPU": _SOME, "commands a turn": _FLAT}).rows("turns")


MEASURES = {
    "tasks": _tasks, "stored": _stored, "tokens": _tokens, "samplers": _samplers, "turns": _turns,
}  # fmt: skip


def main() -> int:
    """Run the measurements and print their slopes. Return 1 if one exceeds its bound."""
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--most", type=int, default=3, choices=(2, 3), help="up to 10 or 100 times as many")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options: Namespace = parser.parse_args()
    rows: list[Row] = []
    with database() as (work, uri):
        for name in options.only:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            rows += asyncio.run(MEASURES[name](uri, 0 if options.quick else options.most, work))
    return finish("Growth", rows, quick=options.quick, file=options.json)


if __name__ == "__main__":
    sys.exit(main())
