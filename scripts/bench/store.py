"""Measure the store against bare database operations, the original system and another commit.

    python scripts/bench/store.py [--quick] [--only NAME ...] [--against DIR] [--json FILE]

Starts its own mongod in a temporary folder. Two variants alternate in this run. A ratio is the median over
the rounds; the two columns beside it show the best round of each variant. admission, finalizing, streams and
samplers compare this checkout with the one given by --against; without it they only show the cost of this
checkout. Exits with 1 if a ratio misses its target.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from commands import database
from harness import Row, bench_parser, finish
from store_operations import claim_latency, claim_rate, reading, size, writing
from store_scale import admission, finalizing, samplers, streams
from store_trajectories import whole

Measure = Callable[[str, bool], Coroutine[Any, Any, list[Row]]]


MEASURES: dict[str, Measure] = {
    "claims": claim_rate, "latency": claim_latency, "writing": writing, "reading": reading, "size": size,
    "whole": whole,
}  # fmt: skip
Compared = Callable[[str, bool, Path | None], Coroutine[Any, Any, list[Row]]]
COMPARED: dict[str, Compared] = {
    "admission": admission, "finalizing": finalizing, "streams": streams, "samplers": samplers,
}  # fmt: skip


def main() -> int:
    """Run the benchmarks and print their table. Return 1 if a ratio misses its target."""
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=[*MEASURES, *COMPARED], default=[*MEASURES, *COMPARED],
        help="run only these benchmarks",
    )  # fmt: skip
    parser.add_argument(
        "--against", type=Path, help="compare with the src of this checkout, at another commit"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    arguments = parser.parse_args()
    against = arguments.against.resolve() if arguments.against else None
    if against is not None and not (against / "src" / "agentrl").is_dir():
        parser.error(f"--against {against} is not a checkout of AgentRL: src/agentrl is missing")
    rows: list[Row] = []
    with database() as (_, uri):
        for name in arguments.only:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            if name in MEASURES:
                rows += asyncio.run(MEASURES[name](uri, arguments.quick))
            else:
                rows += asyncio.run(COMPARED[name](uri, arguments.quick, against))
    return finish("The store", rows, quick=arguments.quick, file=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
