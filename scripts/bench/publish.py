"""Measure how weights get from the trainer to an engine: each way of publishing against a synchronous one.

    python scripts/bench/publish.py [--quick] [--only WAY ...] [--models 135M 1B] [--steps 3] [--json FILE]

Each way runs in a process of its own: the trainer's publishing code, a real MongoDB, and ``agentrl serve``
with the local engine. Between two versions 1.3 % of the weights change by one bfloat16 step, as AdamW at a
learning rate of 1e-6 changes them. Measured are the bytes of a version, the seconds that the trainer waits
after a step, and the seconds from the end of the step until the engine serves the version. The baseline is
measured in the same run: whole weights, written and hashed while the trainer waits, then hashed and loaded by
the engine's host. ``bytes`` trains SmolLM2-135M on texts for 50 steps and measures the delta of each.
Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from commands import database
from harness import Row, bench_parser, finish, run_child
from train_workload import SMOLLM

CHILD = Path(__file__).with_name("publish_child.py")
BASELINE = "baseline"
WAYS = ("full", "delta", "tensor", "distributed", "adapter")
BYTES = "bytes"
DELTA_SHARE = 0.03
"""Most bytes of a delta, as a share of whole weights."""
DELTA_SECONDS = 0.3
"""Most seconds until the engine serves a delta, as a share of the baseline's."""
BETWEEN_SECONDS = 1.5
"""From a version that is served to the next step."""
_TIMEOUT = 900.0


def measure(way: str, model: str, options: argparse.Namespace, uri: str) -> dict[str, Any]:
    """Run one measurement in a process of its own, and return what it prints last."""
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-", dir=options.scratch) as folder:
        wanted = {
            "way": way, "model": model, "steps": options.steps, "uri": uri, "folder": folder,
            "text_steps": 3 if options.quick else 50, "between": 0.0 if options.quick else BETWEEN_SECONDS,
        }  # fmt: skip
        variables = {"OMP_NUM_THREADS": str(options.threads), "TQDM_DISABLE": "1"}
        found: dict[str, Any] = run_child(CHILD, wanted, seconds=_TIMEOUT, **variables)
        return found


def rows(model: str, way: str, found: dict[str, Any], baseline: dict[str, Any]) -> list[Row]:
    """Return the lines of one way: bytes, and seconds of the trainer's wait, until published, and served."""
    name = f"{model} {way}"
    is_delta = way == "delta"
    size, whole = found["bytes"], baseline["bytes"]
    keys = ("waits", "published", "served")
    waits, published, served = (statistics.median(found[key]) for key in keys)
    base_waits, base_published, base_served = (statistics.median(baseline[key]) for key in keys)
    return [
        Row(
            what=f"{name}: bytes of a version", ours=_mb(size), baseline=_mb(whole), ratio=size / whole,
            target=DELTA_SHARE if is_delta and model == "135M" else None, more=False,
        ),
        Row(
            what=f"{name}: the trainer waits", ours=f"{waits:.2f} s", baseline=f"{base_waits:.2f} s",
            ratio=waits / base_waits, more=False,
        ),
        Row(
            what=f"{name}: from the step's end until published", ours=f"{published:.2f} s",
            baseline=f"{base_published:.2f} s", ratio=published / base_published, more=False,
        ),
        Row(
            what=f"{name}: from the step's end until served", ours=f"{served:.2f} s",
            baseline=f"{base_served:.2f} s", ratio=served / base_served,
            target=DELTA_SECONDS if is_delta else None, more=False,
        ),
    ]  # fmt: skip


def bytes_row(found: dict[str, Any]) -> Row:
    """Return the line of the steps that trained on texts."""
    sizes, whole = found["sizes"], found["whole"]
    mean, most = statistics.mean(sizes), max(sizes)
    changed = statistics.mean(found["changed"])
    return Row(
        what=f"delta of a step at 1e-6, mean of {len(sizes)} (largest {_mb(most)}; {changed:.2%} change)",
        ours=_mb(mean), baseline=_mb(whole), ratio=mean / whole, target=DELTA_SHARE, more=False,
    )  # fmt: skip


def shown(measured: list[Row]) -> list[Row]:
    """Print the rows at once, for a run that is ended before its table, and return them."""
    for row in measured:
        print(f"{row.what}: {row.ours}, baseline {row.baseline}, ratio {row.ratio:.3g}", flush=True)
    return measured


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def main(argv: list[str]) -> int:
    """Run the chosen measurements, print their table, and return 1 if a target is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=[*WAYS, BYTES], default=[*WAYS, BYTES])
    parser.add_argument("--models", nargs="+", choices=["135M", "1B"], default=["135M", "1B"])
    parser.add_argument("--steps", type=int, default=3, help="versions of each way, after one that warms up")
    parser.add_argument("--threads", type=int, default=2, help="threads of the trainer (default: 2)")
    parser.add_argument("--scratch", type=Path, help="folder for weights (default: that of temporary files)")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args(argv)
    models = ["tiny"] if options.quick else options.models
    if not options.quick and not SMOLLM.is_dir() and ("135M" in models or BYTES in options.only):
        parser.error(f"{SMOLLM} is missing; `agentrl quickstart` makes it")
    options.steps = 1 if options.quick else options.steps
    table: list[Row] = []
    with database() as (_, uri):
        for model in models:
            baseline = measure(BASELINE, model, options, uri)
            for way in ("delta",) if options.quick else WAYS:
                if way in options.only:
                    table += shown(rows(model, way, measure(way, model, options, uri), baseline))
    if BYTES in options.only:
        table += shown([bytes_row(measure(BYTES, models[0] if options.quick else "135M", options, ""))])
    return finish("Publishing weights", table, quick=options.quick, file=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
