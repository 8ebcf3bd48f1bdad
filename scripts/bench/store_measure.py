"""How the store's benchmark measures: a server of its own, two ways in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from agentrl.config.schema import RunConfig
from agentrl.store.client import Store, open_store
from agentrl.store.embedded.server import EmbeddedMongo

Timed = Callable[[], Awaitable[float]]
"""Does a round of work and returns its cost: seconds, or seconds for each thing done."""


@contextmanager
def server() -> Iterator[str]:
    """The URI of a mongod in a temporary folder, stopped and removed at the end."""
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        mongo = EmbeddedMongo(folder)
        try:
            yield mongo.up().uri
        finally:
            mongo.down()


@asynccontextmanager
async def run_database(uri: str, name: str) -> AsyncIterator[Store]:
    """The store of a new run, dropped at the end."""
    run_name = f"bench_{name}_{uuid.uuid4().hex[:8]}"
    async with await open_store(
        RunConfig(run_name=run_name, db_connection_string=uri, db_timeout_seconds=300.0)
    ) as store:
        yield store
        await store.database.client.drop_database(run_name)


async def in_turn(ours: Timed, baseline: Timed, rounds: int) -> tuple[list[float], list[float]]:
    """Both, ``rounds`` times, the first of a round changing each time; one round before goes uncounted."""
    costs: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        pair = [(ours, costs[0]), (baseline, costs[1])]
        for way, kept in pair if number % 2 else reversed(pair):
            cost = await way()
            if number:
                kept.append(cost)
    return costs


def ratio(ours: list[float], baseline: list[float]) -> float:
    """The median over the rounds of ours ÷ baseline."""
    return statistics.median(mine / other for mine, other in zip(ours, baseline, strict=True))


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yields a function: the seconds since the block began."""
    began = time.perf_counter()
    yield lambda: time.perf_counter() - began


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
