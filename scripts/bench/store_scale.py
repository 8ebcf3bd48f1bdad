"""Compare how the store scales with claimers, samplers and waiting processes, here and at another commit.

Each workload runs in child processes (``store_scale_child.py``) on one server. This checkout's ``src`` and
that of ``--against`` alternate.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import sys
import time
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from harness import Row, percentile
from pymongo import AsyncMongoClient

_CHILD = Path(__file__).with_name("store_scale_child.py")
OURS = Path(__file__).resolve().parents[2]
_LONGEST_SECONDS = 600.0
_PROCESSES = 8
_WARM_UP_SECONDS = 120.0
_START_SECONDS = 15.0
"""Within which samplers begin, each at a time of its own."""
_OPENING_SECONDS = 3.0
"""Until streams of changes are open."""
_POLL_SECONDS = 0.5
_CLAIMERS = {
    "1 claimer": (1, 1, 8), "8 claimers": (1, 8, 8), "64 claimers": (1, 64, 8), "32 clients": (32, 1, 1),
}  # fmt: skip
"""Clients, the claimers of each, and the trajectories of a group."""
_FEW_CLAIMERS = {"8 claimers": (1, 8, 8), "2 clients": (2, 1, 1)}

Json = dict[str, Any]


async def admission(uri: str, quick: bool, against: Path | None) -> list[Row]:
    """Measure claims per second and commands per claim: 1, 8 and 64 claimers in a process, and 32 clients."""
    settings = _FEW_CLAIMERS if quick else _CLAIMERS
    options: Json = {"seconds": 0.1, "tasks": 100} if quick else {"seconds": 4.0, "tasks": 4000}
    options["settings"] = settings
    ours, theirs = await _alternate("admission", uri, options, against, rounds=1 if quick else 2)
    rows = []
    for name, (_, _, generations) in settings.items():
        for field, unit, more in (("rate", "claims/s", True), ("commands", "commands a claim", False)):
            mine, other = ([found[name][field] for found in side] for side in (ours, theirs))
            rows.append(_row(f"{unit}, {name}, groups of {generations}", mine, other, more))
    return rows


async def finalizing(uri: str, quick: bool, against: Path | None) -> list[Row]:
    """Measure reads per group and commands per trajectory: 1 and 32 samplers, 64 concurrent trajectories."""
    rows = []
    for samplers in (1, 2 if quick else 32):
        options = {"samplers": samplers, "groups": 2 if quick else 64, "seconds": 0.1 if quick else 1.0}
        ours, theirs = await _alternate("finalizing", uri, options, against, rounds=1)
        for field, unit in (("reads", "reads of a group"), ("commands", "commands a trajectory")):
            mine, other = ([found[field] for found in side] for side in (ours, theirs))
            rows.append(_row(f"{unit}, {samplers} sampler{'s'[: samplers > 1]}", mine, other, more=False))
    return rows


async def streams(uri: str, quick: bool, against: Path | None) -> list[Row]:
    """Measure the server's CPU time per renewed lease while 1 and 100 processes wait for changes."""
    rows = []
    for waiting in (4,) if quick else (1, 100):
        options = {
            "waiting": waiting, "renewals": 160 if quick else 1600,
            "opening": 0.5 if quick else _OPENING_SECONDS,
        }  # fmt: skip
        ours, theirs = await _alternate("streams", uri, options, against, rounds=1 if quick else 2)
        mine, other = ([found["microseconds"] for found in side] for side in (ours, theirs))
        rows.append(_row(f"µs of mongod's CPU a renewal, {waiting} waiting", mine, other, more=False))
    return rows


async def samplers(uri: str, quick: bool, against: Path | None) -> list[Row]:
    """Measure 1,000 samplers on one server, each with its own client and one 60 s trajectory at a time.

    ``quick`` takes 8 samplers and 1 s. Measuring starts once as many trajectories have begun as there are
    samplers.
    """
    count, lasting, seconds = (8, 0.5, 1.0) if quick else (1000, 60.0, 40.0)
    start = 0.5 if quick else _START_SECONDS
    found = [await many_samplers(uri, source, count, lasting, seconds, start) for source in _sources(against)]
    ours, theirs = found[0], found[1] if against else None
    rows = []
    for field, more in (
        ("trajectories/s", True), ("commands a trajectory", False), ("ms, claim p99", False),
        ("connections", False), ("change streams", False), ("% of a core, mongod", False),
    ):  # fmt: skip
        other = [] if theirs is None else [theirs[field]]
        rows.append(_row(f"{field}, {count:,} samplers", [ours[field]], other, more))
    return rows


def _row(what: str, ours: Sequence[float], theirs: Sequence[float], more: bool) -> Row:
    mine = statistics.median(ours)
    other = statistics.median(theirs) if theirs else None
    return Row(
        what=what, ours=f"{mine:.4g}", baseline="–" if other is None else f"{other:.4g}",
        ratio=mine / other if other else None, more=more,
    )  # fmt: skip


def _sources(against: Path | None) -> list[Path]:
    return [OURS] if against is None else [OURS, against]


async def _alternate(
    workload: str, uri: str, options: Json, against: Path | None, *, rounds: int
) -> tuple[list[Json], list[Json]]:
    """Run the workload on both sides and return their results. Each round swaps the order."""
    found: dict[Path, list[Json]] = {source: [] for source in _sources(against)}
    for number in range(rounds):
        for source in sorted(found, reverse=bool(number % 2)):
            child = await _start(source, workload, uri, {**options, "run": _run_name()})
            found[source].append(await _result(child))
    return found[OURS], [] if against is None else found[against]


async def many_samplers(
    uri: str, source: Path, count: int, lasting: float, seconds: float, start: float
) -> Json:
    """Measure ``count`` samplers in several processes for ``seconds``.

    They begin within ``start`` seconds. A trajectory takes ``lasting`` seconds.
    """
    run = _run_name()
    groups = int(count / 8 * (3 + (seconds + _WARM_UP_SECONDS) / lasting))
    await _result(await _start(source, "prepare", uri, {"run": run, "groups": groups}))
    processes = min(_PROCESSES, count // 4)
    options = {"run": run, "samplers": count // processes, "seconds": lasting, "start": start}
    children = [await _start(source, "join", uri, options) for _ in range(processes)]
    client: AsyncMongoClient[Json] = AsyncMongoClient(uri)
    try:
        await asyncio.gather(*(_expect(child, "ready") for child in children))
        began = time.monotonic()
        records = client[run]["Record"]
        while await records.estimated_document_count() < count:
            if time.monotonic() - began > _WARM_UP_SECONDS:
                print(
                    f"some samplers have not claimed after {_WARM_UP_SECONDS:g} s; measuring anyway",
                    file=sys.stderr,
                    flush=True,
                )
                break
            await asyncio.sleep(_POLL_SECONDS)
        status = await client.admin.command("serverStatus")
        mongod = psutil.Process(status["pid"])
        for child in children:
            _continue(child)
        before = mongod.cpu_times()
        await asyncio.sleep(seconds)
        after = mongod.cpu_times()
        status = await client.admin.command("serverStatus")
        found = {
            "connections": status["connections"]["current"],
            "change streams": await _count_streams(client),
            "% of a core, mongod": 100 * (after.user + after.system - before.user - before.system) / seconds,
        }
        for child in children:
            _continue(child)
        parts = await asyncio.gather(*(_result(child) for child in children))
        ended = sum(part["ended"] for part in parts)
        if ended:
            raise RuntimeError(f"{ended} of {count} samplers ended early; see above")
        scored = sum(part["scored"] for part in parts)
        claims = [value for part in parts for value in part["claims"]]
        return {
            **found, "trajectories/s": scored / seconds,
            "ms, claim p99": 1000 * percentile(claims, 0.99) if claims else math.nan,
            "commands a trajectory": sum(part["commands"] for part in parts) / scored if scored else math.nan,
        }  # fmt: skip
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
        await asyncio.gather(*(child.wait() for child in children))
        await client.drop_database(run)
        await client.close()


async def _count_streams(client: AsyncMongoClient[Json]) -> int:
    is_stream = {"cursor.originatingCommand.pipeline.0.$changeStream": {"$exists": True}}
    pipeline: list[Json] = [
        {"$currentOp": {"allUsers": True, "idleCursors": True}}, {"$match": is_stream}, {"$count": "streams"},
    ]  # fmt: skip
    async for found in await client.admin.aggregate(pipeline):
        return int(found["streams"])
    return 0


def _run_name() -> str:
    return f"bench_scale_{uuid.uuid4().hex[:8]}"


async def _start(source: Path, workload: str, uri: str, options: Json) -> Process:
    folders = [str(source / "src"), str(_CHILD.parent)]
    return await asyncio.create_subprocess_exec(
        sys.executable, str(_CHILD), workload, uri, json.dumps(options),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)}, stdin=PIPE, stdout=PIPE, limit=1 << 26,
    )  # fmt: skip


async def _result(child: Process) -> Json:
    """Wait for the child to end and return the last line that it printed, as JSON."""
    assert child.stdout is not None
    async with asyncio.timeout(_LONGEST_SECONDS):
        lines = (await child.stdout.read()).decode().splitlines()
        await child.wait()
    if child.returncode or not lines:
        raise RuntimeError(f"a workload ended with exit code {child.returncode}; see above")
    found: Json = json.loads(lines[-1])
    return found


async def _expect(child: Process, expected: str) -> None:
    """Wait for the child to print a line that is equal to ``expected``."""
    assert child.stdout is not None
    async with asyncio.timeout(_LONGEST_SECONDS):
        line = (await child.stdout.readline()).decode().strip()
    if line != expected:
        raise RuntimeError(f"a workload printed {line!r} instead of {expected!r}; see above")


def _continue(child: Process) -> None:
    """Send the child the line that starts its next phase."""
    assert child.stdin is not None
    child.stdin.write(b"\n")
