"""Measure the store against bare database operations and against the original's way of doing it.

    python scripts/bench/store.py [--quick] [--only NAME ...] [--json FILE]

Starts a mongod of its own in a temporary folder. A ratio compares two ways that took turns in this run: it is
the median over the rounds, and what each way cost is its best round. Exits with 1 if a ratio misses its
target.
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
from store_whole import whole
from store_writing import reading, size, writing

Measure = Callable[[str, bool], Coroutine[Any, Any, list[Row]]]


async def _size(uri: str, quick: bool) -> list[Row]:
    return size()


MEASURES: dict[str, Measure] = {
    "claims": claim_rate, "latency": claim_latency, "writing": writing, "reading": reading, "size": _size,
    "whole": whole,
}  # fmt: skip


def main() -> int:
    """Measure, print, and say by the exit code whether every target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and 50,000 Tasks for the million")
    parser.add_argument(
        "--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="measure only these"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with server() as uri:
        for name in arguments.only:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            rows += asyncio.run(MEASURES[name](uri, arguments.quick))
    print_rows("The store", rows)
    if arguments.json:
        arguments.json.write_text(
            json.dumps([row.plain() for row in rows], indent=2) + "\n", encoding="utf-8"
        )
    return int(any(row.passed is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
