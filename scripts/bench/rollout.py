"""Measure rollouts against an engine that answers at once, with a real mongod.

    python scripts/bench/rollout.py [--quick] [--only NAME ...] [--model FOLDER] [--json FILE]

``cpu-6k``, ``cpu-75k``: the sampler's CPU time per turn, 64 concurrent trajectories of 10 turns, from claims
to scores, beside that of a client that sends the same requests, parses the answers and does nothing else
(``rollout_bare.py``), and of one that also renders, tokenizes and inserts each turn, all medians of three
alternating runs; ``together``: the time from an answer to the
next request of the same trajectory when 64 answers arrive together; ``memory``: the peak memory of one
sampler with 1,000 concurrent trajectories. Sampler, engine and mongod are processes of their own. Without
--model a tokenizer is made like that of the tiny quickstart. Exits with 1 if a target is missed. With
--profile nothing is compared.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import database
from harness import Row, bench_parser, finish, run_child

HERE = Path(__file__).parent
TURNS = 10
_TIMEOUT = 600.0
_MILLI = 1000.0
CPU_RATIO = 1.5
_ROUNDS = 3
_MIB = 2**20


@dataclass(frozen=True)
class Workload:
    """One measurement; ``together``: answers leave when so many requests wait."""

    tokens: int
    groups: int
    concurrency: int = 64
    turns: int = TURNS
    together: int = 1


WORKLOADS = {
    "cpu-6k": Workload(6_000, groups=16),
    "cpu-75k": Workload(75_000, groups=8),
    "together": Workload(6_000, groups=16, together=64),
    "memory": Workload(6_000, groups=125, concurrency=1000, turns=3, together=1000),
}


QUICK = Workload(300, groups=1, concurrency=8, turns=2, together=8)


@contextmanager
def engine(model: str, work: Workload) -> Iterator[subprocess.Popen[str]]:
    """Start the engine; its port is the first line of its output."""
    command = [sys.executable, str(HERE / "rollout_engine.py"), model, str(work.turns), str(work.together)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def measure(
    uri: str,
    model: str,
    work: Workload,
    profile: str | None = None,
    child: str = "rollout_child",
    *,
    stores: bool = False,
) -> dict[str, Any]:
    """Run one workload in new processes."""
    with engine(model, work) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        options = {
            "uri": uri, "run": f"bench_rollout_{uuid.uuid4().hex[:8]}", "model": model, "tokens": work.tokens,
            "engine_url": f"http://127.0.0.1:{process.stdout.readline().strip()}", "groups": work.groups,
            "generations": 8, "turns": work.turns, "concurrency": work.concurrency, "profile": profile,
            "stores": stores,
        }  # fmt: skip
        found = run_child(HERE / f"{child}.py", options, seconds=_TIMEOUT)
        process.stdin.write("\n")
        process.stdin.flush()
        latencies = json.loads(process.stdout.readline())
    return {**found, "latencies": latencies}


def measure_both(uri: str, model: str, work: Workload, rounds: int) -> dict[str, Any]:
    """Run one workload and the bare clients in turns; return the medians.

    ``bare_cpu`` is that of the client that stores nothing, ``floor_cpu`` of the one that stores each turn.
    """
    found: dict[str, list[dict[str, Any]]] = {"": [], "bare_cpu": [], "floor_cpu": []}
    for _ in range(rounds):
        found[""].append(measure(uri, model, work))
        for name in ("bare_cpu", "floor_cpu"):
            found[name].append(measure(uri, model, work, child="rollout_bare", stores=name == "floor_cpu"))
    middle = sorted(found.pop(""), key=lambda each: each["cpu"])[rounds // 2]
    return {
        **middle,
        **{name: statistics.median(each["cpu"] for each in runs) for name, runs in found.items()},
    }


def commands_row(found: dict[str, Any], work: Workload) -> Row:
    """Return the line of the database's work for one trajectory."""
    what = f"MongoDB commands a trajectory of {work.turns} turns"
    return Row(what=what, ours=f"{found['commands']:.1f}", baseline="–", ratio=None)


def row(name: str, found: dict[str, Any]) -> Row:
    """Return the line of one workload; its ratio is to the target."""
    if name == "together":
        p99 = _MILLI * statistics.quantiles(found["latencies"], n=100)[-1]
        median = _MILLI * statistics.median(found["latencies"])
        what = "latency of a turn, 64 arriving together: p99 (median)"
        return Row(
            what=what, ours=f"{p99:.0f} ms ({median:.0f} ms)", baseline="60 ms", ratio=p99 / 60, target=1.0,
            more=False,
        )  # fmt: skip
    if name == "memory":
        used = found["peak_bytes"] / _MIB
        return Row(
            what="peak memory, 1,000 concurrent trajectories", ours=f"{used:.0f} MiB", baseline="2048 MiB",
            ratio=used / 2048, target=1.0, more=False,
        )  # fmt: skip
    cpu, bare, floor = (
        _MILLI * found.get(each, float("nan")) / found["turns"] for each in ("cpu", "bare_cpu", "floor_cpu")
    )
    what = f"CPU a turn, {name[4:].upper()}-token contexts : bare client (that stores: {floor:.2f} ms)"
    return Row(
        what=what,
        ours=f"{cpu:.2f} ms",
        baseline=f"{bare:.2f} ms",
        ratio=cpu / bare,
        target=CPU_RATIO,
        more=False,
    )


CONTEXT = 300_000
"""Tokens of the longest context that the benchmarks allow."""


def make_model(folder: Path) -> str:
    """Write the tiny quickstart's model, for contexts of ``CONTEXT`` tokens."""
    import demo_path  # noqa: F401
    from demo.tiny import build_tiny_model

    return str(build_tiny_model(folder / "model", 0, context_tokens=CONTEXT))


def main(argv: list[str]) -> int:
    """Run the chosen workloads, print a table, and return 1 if a target is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--model", help=f"folder of a model with a context of {CONTEXT:,} tokens")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", help="print cProfile's table of the sampler, sorted by this column")
    options = parser.parse_args(argv)
    with database() as (folder, uri):
        model = options.model or make_model(folder)
        if options.quick:  # one run has all figures
            found = dict.fromkeys(options.only, measure_both(uri, model, QUICK, 1))
        else:
            found = {
                name: measure_both(uri, model, WORKLOADS[name], _ROUNDS)
                if name.startswith("cpu") and options.profile is None
                else measure(uri, model, WORKLOADS[name], options.profile)
                for name in options.only
            }
        rows = [row(name, found[name]) for name in options.only]
        work = dict.fromkeys(WORKLOADS, QUICK) if options.quick else WORKLOADS
        rows += [commands_row(found[name], work[name]) for name in options.only if name == "cpu-6k"]
    return finish("rollouts", rows, quick=options.quick, file=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
