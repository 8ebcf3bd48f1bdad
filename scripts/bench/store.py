"""Measure the store against bare database operations and against the original's way of doing it.

    python scripts/bench/store.py [--quick] [--only NAME ...] [--against DIR] [--json FILE]

Starts a mongod of its own in a temporary folder. A ratio compares two ways that took turns in this run: it is
the median over the rounds, and what each way cost is its best round. The rows of admission, finalising,
streams and samplers compare this checkout with another one, --against, and without it only show what this one
costs. Exits with 1 if a ratio misses its target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rows import Row, print_rows
from store_claims import claim_latency, claim_rate
from store_measure import server
from store_scale import admission, finalising, samplers, streams
from store_whole import whole
from store_writing import reading, size, writing

Measure = Callable[[str, bool], Coroutine[Any, Any, list[Row]]]


async def _size(uri: str, quick: bool) -> list[Row]:
    return size()


MEASURES: dict[str, Measure] = {
    "claims": claim_rate, "latency": claim_latency, "writing": writing, "reading": reading, "size": _size,
    "whole": whole,
}  # fmt: skip
Compared = Callable[[str, bool, Path | None], Coroutine[Any, Any, list[Row]]]
COMPARED: dict[str, Compared] = {
    "admission": admission, "finalising": finalising, "streams": streams, "samplers": samplers,
}  # fmt: skip


def main() -> int:
    """Measure, print, and say by the exit code whether every target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and 50,000 Tasks for the million")
    parser.add_argument(
        "--only", nargs="+", choices=[*MEASURES, *COMPARED], default=[*MEASURES, *COMPARED],
        help="measure only these",
    )  # fmt: skip
    parser.add_argument(
        "--against", type=Path, help="a checkout of another commit, whose src is compared with this one"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    against = arguments.against.resolve() if arguments.against else None
    if against is not None and not (against / "src" / "agentrl").is_dir():
        parser.error(f"--against {against} is not a checkout: src/agentrl is missing")
    rows: list[Row] = []
    with server() as uri:
        for name in arguments.only:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            if name in MEASURES:
                rows += asyncio.run(MEASURES[name](uri, arguments.quick))
            else:
                rows += asyncio.run(COMPARED[name](uri, arguments.quick, against))
    print_rows("The store", rows)
    if arguments.json:
        arguments.json.write_text(
            json.dumps([row.plain() for row in rows], indent=2) + "\n", encoding="utf-8"
        )
    return int(any(row.passed is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
