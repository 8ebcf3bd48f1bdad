"""Compare the wall time of what-ifs with that of sampling anew, and check that a replay is bit for bit.

    python scripts/bench/whatif.py --steps 20 --folder /tmp/bench-whatif

The parent is `agentrl quickstart --tiny`: its seconds are those of its trainer, from its start to its last
step, while engine and samplers work beside it. Then these are off, and the same steps are trained again:
without other flags, with GSPO and with CISPO. Their seconds are those of the whole command, the start of
Python and the page included. Prints a line per run with the ratio to the parent.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from commands import agentrl
from harness import bench_parser, stopwatch

from agentrl.config.run import RunConfig
from agentrl.documents.training import TrainStep
from agentrl.store.client import open_existing

CASES = {"same": (), "gspo": ("--loss_calculater", "GSPO"), "cispo": ("--loss_calculater", "CISPO")}
TIMED = ("seconds", "per_second", "mfu", "groups_", "published_", "stale_", "quarantined")


async def trained(name: str) -> tuple[list[TrainStep], float, str | None]:
    """Return a run's steps, the seconds of its trainer, and the digest of its newest weights."""
    async with await open_existing(RunConfig(run_name=name)) as store:
        steps = await store.steps.find()
        flags = (await store.settings.resolved())["train"]
        newest = await store.policy_versions.latest()
    ended = max(step.committed_at for step in steps if step.committed_at is not None)
    return steps, (ended - flags.at).total_seconds(), None if newest is None else newest.digest


def exact(step: TrainStep) -> dict[str, object]:
    """Return the metrics that do not depend on time."""
    return {name: value for name, value in step.metrics.items() if not any(part in name for part in TIMED)}


def main() -> None:
    """Run the parent and its what-ifs, and print their seconds."""
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-whatif"))
    parser.add_argument("--parent", help="a run that quickstart has trained in --folder (default: train one)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.folder)
    for name in ("MONGO_URI", "MONGO_URI_FILE"):
        os.environ.pop(name, None)
    parent = arguments.parent or f"bench{int(time.time())}"
    if arguments.parent is None:
        wanted = "3" if arguments.quick else str(arguments.steps)
        agentrl("quickstart", ["--tiny", "--steps", wanted, "--run_name", parent], Path())
    agentrl("mongo", ["up"], Path())
    try:
        steps, seconds, digest = asyncio.run(trained(parent))
        print(f"{'sampled anew':14} {len(steps)} steps {seconds:7.1f} s")
        for case, flags in CASES.items():
            child = f"{parent}_{case}{int(time.time())}"
            with stopwatch() as elapsed:
                agentrl("whatif", [parent, child, *flags], Path())
                own = elapsed()
            again, _, found = asyncio.run(trained(child))
            print(f"{case:14} {len(again)} steps {own:7.1f} s  {own / seconds:.2f} of sampling anew")
            if case == "same":
                equal = sum(exact(one) == exact(two) for one, two in zip(steps, again, strict=True))
                print(f"{'':14} equal: metrics of {equal} of {len(steps)} steps, weights {digest == found}")
    finally:
        agentrl("mongo", ["down"], Path())


if __name__ == "__main__":
    main()
