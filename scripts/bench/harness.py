"""Time two variants in alternation, compare them, and print the results beside their targets."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 150
T = TypeVar("T")

Timed = Callable[[], Awaitable[float]]
"""Run one round of work and return its cost: seconds, or seconds per item."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measurement, its baseline and their ratio. ``more`` is False where a lower ratio is better.

    A row without a target is only for information. A row without a baseline has no ratio. A row with
    ``equal`` proves that both did the same work: its ratio may differ from 1 by no more than that.
    """

    what: str
    ours: str
    baseline: str
    ratio: float | None
    target: float | None = None
    more: bool = True
    equal: float | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the ratio meets its target; None without a ratio or a target."""
        if self.ratio is not None and self.equal is not None:
            return abs(self.ratio - 1) <= self.equal
        if self.target is None or self.ratio is None:
            return None
        return self.ratio >= self.target if self.more else self.ratio <= self.target

    def plain(self) -> dict[str, Any]:
        """Return the row as a dict for the JSON file."""
        return {**asdict(self), "passed": self.passed}


def print_rows(what: str, rows: list[Row]) -> None:
    """Print the rows as a table on stdout. Its title names the benchmark, the time and the machine."""
    where = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}"
    title = f"{what}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {where}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("measured", "ours", "baseline", "ratio", "target", ""):
        table.add_column(name, justify="left" if name in ("measured", "") else "right")
    verdicts = {True: "pass", False: "FAIL", None: ""}
    for row in rows:
        limit = "–" if row.target is None else f"{'≥' if row.more else '≤'} {row.target:g}"
        limit = limit if row.equal is None else f"1 ± {row.equal:g}"
        reached = "–" if row.ratio is None else f"{row.ratio:.3g}"
        table.add_row(row.what, row.ours, row.baseline, reached, limit, verdicts[row.passed])
    Console(width=_WIDTH, markup=False, highlight=False).print(table)


def bench_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is ``text``, with ``--quick``: the smallest run of all the code."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a run of seconds, whose targets of speed do not count"
    )
    return parser


def finish(what: str, rows: list[Row], *, quick: bool, file: Path | None = None) -> int:
    """Print the rows, write them to ``file``, and return 1 if one failed. In the quick form only rows that
    prove equal work have a target."""
    rows = [replace(row, target=None) for row in rows] if quick else rows
    print_rows(what, rows)
    if file is not None:
        file.write_text(json.dumps([row.plain() for row in rows], indent=2), encoding="utf-8")
    return int(any(row.passed is False for row in rows))


async def alternate(ours: Timed, baseline: Timed, rounds: int) -> tuple[list[float], list[float]]:
    """Run both ``rounds`` times and return their costs. Each round swaps the order; one warm-up round before
    them is not counted.
    """
    costs: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        pair = [(ours, costs[0]), (baseline, costs[1])]
        for run, kept in pair if number % 2 else reversed(pair):
            cost = await run()
            if number:
                kept.append(cost)
    return costs


def median_ratio(ours: list[float], baseline: list[float]) -> float:
    """Return the median over the rounds of ours ÷ baseline."""
    return statistics.median(mine / other for mine, other in zip(ours, baseline, strict=True))


def percentile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run_child(program: Path, wanted: Mapping[str, Any], *, seconds: float, **variables: str) -> Any:
    """Run a program in a process of its own, with ``wanted`` as JSON; return its last line, also JSON.

    ``variables`` are added to its environment. Raises SubprocessError if it fails, or after ``seconds``.
    """
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(wanted)], env={**os.environ, **variables},
        stdout=subprocess.PIPE, text=True, timeout=seconds, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def run_ranks(
    call: Callable[..., T], world: int, *arguments: Any, method: str = "fork", seconds: float = 1800.0
) -> list[T]:
    """Return ``call(rank, world, *arguments)`` of each rank, which runs in a process of its own.

    ``method`` starts the processes. Exits if one ends without a result, or after ``seconds``.
    """
    context = multiprocessing.get_context(method)
    results: Any = context.Queue()
    ranks = [
        context.Process(target=_run_rank, args=(results, call, rank, world, arguments))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found: dict[int, T] = {}
    deadline = time.monotonic() + seconds
    try:
        while len(found) < world:
            try:
                rank, value = results.get(timeout=1.0)
                found[rank] = value
            except queue.Empty:
                codes = [process.exitcode for process in ranks if process.exitcode]
                if codes or time.monotonic() > deadline:
                    what = f"exit code {codes[0]}" if codes else f"no result in {seconds:g} s"
                    raise SystemExit(f"a rank failed: {what}") from None
        for process in ranks:
            process.join(60)
    finally:
        for process in ranks:
            process.kill()
    return [found[rank] for rank in range(world)]


def _run_rank(results: Any, call: Callable[..., Any], rank: int, world: int, arguments: Any) -> None:
    results.put((rank, call(rank, world, *arguments)))


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since the block began."""
    began = time.perf_counter()
    yield lambda: time.perf_counter() - began
