"""Measure the prompt tokens that engines compute again, over trajectories of 10 turns on two real engines.

    python scripts/bench/prefix_cache.py [--quick] [--engines local sglang] [--json FILE]

Groups of trajectories with a common prompt run on two engines of one kind: first with AgentRL's routing, then
with each turn on an engine at random, after the caches are flushed. A prompt token is computed again if an
earlier call had computed it (a turn of its trajectory or, for the group's prompt, another trajectory) and the
engine does not report it as cached. Its share of all prompt tokens has the target; the share of cached tokens
is the prefix-cache hit rate. ``sglang`` is skipped where it is not installed, and by ``--quick`` unless it is
named. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import demo_path  # noqa: F401
from demo.tiny import build_tiny_model
from harness import Row, bench_parser, finish

from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus
from agentrl.errors import ConfigError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import Generation
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.engines.commands import EngineProcess, engine_command, free_port
from agentrl.inference.session import EngineRouter

ENGINES = 2
CONCURRENCY = 16
PROMPT, GENERATED, RESULT = 300, 16, 60
"""Tokens of a group's prompt, of a turn, and of the tool result after it."""
TARGET = 0.10
CACHE_TOKENS = 65536
VOCABULARY = 256
_START_SECONDS = 300.0

Generate = Callable[[list[int]], Awaitable[Generation]]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    groups: int = 8
    generations: int = 4
    turns: int = 10

    @property
    def trajectories(self) -> list[tuple[int, int]]:
        """Return (group, number) of each trajectory."""
        return [(group, number) for group in range(self.groups) for number in range(self.generations)]


QUICK = Sizes(groups=2, generations=2, turns=2)


@dataclass
class Counts:
    """Prompt tokens of all calls: in total, cached, and computed again."""

    prompt: int = 0
    cached: int = 0
    again: int = 0
    engines: set[str] = field(default_factory=set)

    def add(self, ids: Sequence[int], known: int, made: Generation) -> None:
        """Count a call whose first ``known`` tokens had been computed before."""
        self.prompt += len(ids)
        self.cached += made.cached_tokens
        self.again += max(0, known - made.cached_tokens)
        self.engines.add(made.engine_url)


async def trajectory(generate: Generate, group: int, number: int, turns: int, counts: Counts) -> None:
    """Run the turns of one trajectory; only the group's first one has a prompt that is new."""
    ids, known = random_ids(f"prompt {group}", PROMPT), PROMPT if number else 0
    for turn in range(turns):
        made = await generate(ids)
        counts.add(ids, known, made)
        ids = [*ids, *made.output_ids]
        known = len(ids) - 1  # the last token is sampled, and not computed yet
        ids = [*ids, *random_ids(f"result {group} {number} {turn}", RESULT)]


def random_ids(seed: str, count: int) -> list[int]:
    """Return ``count`` ids, the same for the same seed."""
    return random.Random(seed).choices(range(10, VOCABULARY), k=count)


async def routed(router: EngineRouter, sizes: Sizes, counts: Counts) -> None:
    """Run all trajectories with AgentRL's routing."""

    async def one(group: int, number: int) -> None:
        async with limit, router.session(f"{group}-{number}", f"{group}") as session:
            await trajectory(lambda ids: session.generate(ids, PARAMS), group, number, sizes.turns, counts)

    limit = asyncio.Semaphore(CONCURRENCY)
    await asyncio.gather(*(one(group, number) for group, number in sizes.trajectories))


async def at_random(clients: Sequence[EngineClient], sizes: Sizes, counts: Counts) -> None:
    """Run all trajectories with each turn on an engine at random."""
    draw = random.Random(0)

    async def one(group: int, number: int) -> None:
        async def generate(ids: list[int]) -> Generation:
            rid = f"{draw.random()}-{group}-{number}"
            return await draw.choice(clients).generate(ids, PARAMS, rid)

        async with limit:
            await trajectory(generate, group, number, sizes.turns, counts)

    limit = asyncio.Semaphore(CONCURRENCY)
    await asyncio.gather(*(one(group, number) for group, number in sizes.trajectories))


PARAMS = SamplingParams(max_new_tokens=GENERATED, extra={"ignore_eos": True})


@asynccontextmanager
async def running(kind: str, folder: Path) -> AsyncIterator[list[EngineClient]]:
    """Start the engines; yield their clients once ready. Raises ConfigError if ``kind`` is not installed."""
    config = EngineConfig(engine=kind, max_total_tokens=CACHE_TOKENS, inf_mem_ratio=0.1)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        clients, processes = [], []
        for number in range(ENGINES):
            port = free_port(config.host)
            command = engine_command(str(folder / "model"), ModelConfig(), config, port)
            processes.append(EngineProcess(command, folder / f"{kind}-{number}.log"))
            stack.push_async_callback(processes[-1].stop)
            url = f"http://{config.host}:{port}"
            clients.append(await stack.enter_async_context(engine_client(kind, url)))
        for process, client in zip(processes, clients, strict=True):
            await process.wait_ready(client, _START_SECONDS)
        yield clients


async def measure(kind: str, folder: Path, sizes: Sizes) -> tuple[Counts, Counts]:
    """Return the counts with AgentRL's routing, and with random routing, on the same engines."""
    async with running(kind, folder) as clients:
        services = [
            InferenceService(
                id=client.url,
                url=client.url,
                engine=kind,
                model="m",
                status=ServiceStatus.READY,
                host="h",
                pid=1,
            )
            for client in clients
        ]

        async def live() -> Sequence[InferenceService]:
            return services

        ours, baseline = Counts(), Counts()
        router = EngineRouter(live)
        await routed(router, sizes, ours)
        await router.close()
        for client in clients:
            await client.flush_cache()
        await at_random(clients, sizes, baseline)
        return ours, baseline


def rows_of(kind: str, ours: Counts, baseline: Counts) -> list[Row]:
    """Return the lines of one kind of engine."""
    again, random_again = ours.again / ours.prompt, baseline.again / baseline.prompt
    return [
        Row(
            what=f"{kind}: prompt tokens computed again, {ours.prompt:,} in all, {len(ours.engines)} engines",
            ours=f"{again:.1%}", baseline=f"{random_again:.1%}", ratio=again, target=TARGET, more=False,
        ),
        Row(
            what=f"{kind}: prefix-cache hit rate", ours=f"{ours.cached / ours.prompt:.1%}",
            baseline=f"{baseline.cached / baseline.prompt:.1%}", ratio=None,
        ),
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure each kind of engine, print a table, and return 1 if a target is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--engines", nargs="*", choices=["local", "sglang"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sizes = QUICK if options.quick else Sizes()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_model(Path(folder) / "model", 0)
        # two SGLang servers take minutes to start on a CPU
        for kind in options.engines or (["local"] if options.quick else ["local", "sglang"]):
            try:
                rows += rows_of(kind, *asyncio.run(measure(kind, Path(folder), sizes)))
            except ConfigError as error:
                print(f"{kind} is skipped: {error}; {error.hint}")
    what = "prefix cache (baseline: each turn on an engine at random)"
    return finish(what, rows, quick=options.quick, file=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
