"""Train one very long trajectory for a step, in one process and in two that split its tokens, and compare.

    OMP_NUM_THREADS=1 python scripts/bench/long_trajectory.py                       131,072 tokens: an hour
    OMP_NUM_THREADS=1 python scripts/bench/long_trajectory.py --tokens 8192 --ways chain merged calls
    OMP_NUM_THREADS=1 python scripts/bench/long_trajectory.py --quick

A model of two layers (Qwen3 shape, random weights) trains the trajectory in three ways:

- ``chain``: one context of ``--turns`` model calls, each of which continues the one before: one chain
- ``merged``: three calls, of which the last goes back to an eighth of the context and branches off there; the
  prefix that they have in common is computed once (``--prefix_merging trajectory``)
- ``calls``: the same three calls, each a chain of its own (``--prefix_merging off``)

Each way runs once in one process and once in two that torchrun starts, with ``--cp_size 2`` on gloo. The
processes are those of a run: flags, mesh, ``build_trainer`` and ``PolicyTrainer.train``. Prints seconds of
the step, CPU seconds and peak resident memory of the process that needs most, its growth by the step, and
what ``agentrl plan`` computes for it. Fails if loss or gradient norm differ by more than 1e-4 between the
ways and processes that compute the same, or the weights by more than 1e-3 of the update.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import Row, bench_parser, finish
from long_trajectory_child import WAYS, planned_bytes, save_model

CHILD = Path(__file__).with_name("long_trajectory_child.py")
EQUAL = 1e-4
EQUAL_WEIGHTS = 1e-3
MIB = 2**20
Measured = Mapping[str, Any]


def main() -> int:
    """Run the ways that the command line names."""
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of the longest path")
    parser.add_argument("--turns", type=int, default=128, help="model calls of the chain")
    parser.add_argument("--ways", nargs="+", default=["merged", "calls"], choices=list(WAYS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2], help="numbers of processes")
    parser.add_argument("--seconds", type=float, default=7200.0, help="limit of one step")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    groups = [[way] for way in arguments.ways]
    if arguments.quick:  # all in one start of the processes: their memory is then not that of a way
        arguments.tokens, arguments.turns, groups = 1024, 8, [list(WAYS)]

    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name:
        folder = Path(name)
        save_model(folder / "model", arguments.tokens)
        first: dict[str, Measured] = {}
        for ways, processes in itertools.product(groups, arguments.processes):
            wanted = {
                "folder": name, "ways": ways, "tokens": arguments.tokens, "turns": arguments.turns,
                "processes": processes,
            }  # fmt: skip
            for found in _measure(wanted, arguments.seconds):
                print(json.dumps(found), flush=True)
                rows += _rows(found, planned_bytes(folder / "model", found))
                # Both ways of the branching trajectory compute the same step.
                reference = first.setdefault("chain" if found["way"] == "chain" else "branching", found)
                if reference is not found:
                    rows += _equal_rows(found, reference)
    what = f"a trajectory of {arguments.tokens:,} tokens"
    return finish(what, rows, quick=arguments.quick, file=arguments.json)


def _measure(wanted: Measured, seconds: float) -> list[Measured]:
    """Run a step of each way in processes of their own, and return what rank 0 prints."""
    words = [str(CHILD), json.dumps(wanted)]
    if wanted["processes"] > 1:
        count = str(wanted["processes"])
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count, *words]
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        text=True, timeout=seconds, check=True,
    )  # fmt: skip
    found: list[Measured] = json.loads(done.stdout.splitlines()[-1])
    return found


def _name(found: Measured) -> str:
    return f"{found['way']}, {found['processes']} process{'es' * (found['processes'] > 1)}"


def _rows(found: Measured, planned: int) -> list[Row]:
    name = _name(found)
    peak = max(found["peak_bytes"])
    grown = max(found["grown_bytes"])
    return [
        Row(
            what=f"{name}: {found['micro_batches']:.0f} micro-batches, {found['computed']:,} tokens, step",
            ours=f"{found['seconds']:.1f} s", baseline=f"CPU {max(found['cpu_seconds']):.1f} s", ratio=None,
        ),
        Row(
            what=f"{name}: peak of a process {peak / MIB:,.0f} MiB; growth by the step, and planned",
            ours=f"{grown / MIB:,.0f} MiB", baseline=f"{planned / MIB:,.0f} MiB", ratio=grown / planned,
        ),
    ]  # fmt: skip


def _equal_rows(found: Measured, reference: Measured) -> list[Row]:
    import torch

    name = f"{_name(found)}, beside {_name(reference)}"
    rows = [
        Row(
            what=f"{name}: {key}", ours=f"{found[key]:.7g}", baseline=f"{reference[key]:.7g}",
            ratio=found[key] / reference[key], equal=EQUAL,
        )
        for key in ("loss", "grad_norm")
    ]  # fmt: skip
    ours, theirs, start = (
        torch.load(each) for each in (found["weights"], reference["weights"], found["start"])
    )
    apart = sum(float((ours[key] - theirs[key]).square().sum()) for key in ours) ** 0.5
    moved = sum(float((theirs[key] - start[key]).square().sum()) for key in ours) ** 0.5
    return [
        *rows,
        Row(
            what=f"{name}: difference in weights, and update", ours=f"{apart:.3g}",
            baseline=f"{moved:.3g}", ratio=1 + apart / moved, equal=EQUAL_WEIGHTS,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
