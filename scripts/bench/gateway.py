"""Measure a gateway in a process of its own, on an engine that streams a fixed text, with a real mongod.

    python scripts/bench/gateway.py [--quick] [--only NAME ...] [--model FOLDER] [--json FILE]

``6k``, ``75k``: the gateway's CPU time of a streamed call that continues a conversation of so many tokens, 8
conversations at a time, that of a relay which only passes the same requests to the engine, in alternation,
and that of the first call, which renders the prompt; ``first-token``: the time to the first text of a stream,
compared with that of the engine; ``streams``: 256 streams at a time, through the gateway and straight to the
engine. Without --model a tokenizer is made like that of the tiny quickstart. Exits with 1 if a target is
missed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
from commands import database
from harness import Row, bench_parser, finish
from rollout import make_model
from rollout_engine import WORDS, text_of
from store_fixtures import run_database

from agentrl.documents.record import GatewaySession
from agentrl.documents.run import InferenceService
from agentrl.documents.status import RecordStatus, ServiceStatus
from agentrl.documents.task import Slot, Task
from agentrl.gateway.app import token_digest
from agentrl.store.client import Store

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    conversations: int = 8
    turns: int = 9
    calls: int = 40
    streams: int = 256
    tokens: int | None = None
    """Of every context; None leaves what its name says."""


QUICK = Sizes(conversations=2, turns=2, calls=6, streams=4, tokens=200)

_MILLI = 1000.0
_LEASE = 3600.0


@dataclass(frozen=True)
class Bench:
    """The running processes."""

    store: Store
    url: str
    engine_url: str
    model: str
    gateway: psutil.Process
    relay_url: str
    relay: psutil.Process
    client: httpx2.AsyncClient

    def cpu(self, process: psutil.Process | None = None) -> float:
        """Return the CPU seconds of a process, by default the gateway."""
        used = (process or self.gateway).cpu_times()
        return float(used.user + used.system)

    async def urls(self, count: int) -> list[str]:
        """Begin trajectories; return their base URLs."""
        name = secrets.token_hex(4)
        slots = tuple(Slot(traj_id=each) for each in range(count))
        task = Task(
            id=f"train/0/{name}", task_id=name, split="train", epoch=0, order=0, query="?", slots=slots
        )
        await self.store.tasks.load([task])
        found = []
        for _ in range(count):
            claim = await self.store.claims.claim(split="train", owner="bench", lease_seconds=_LEASE)
            assert claim is not None
            await self.store.records.create(claim)
            await self.store.records.advance(claim, RecordStatus.RUNNING)
            token = secrets.token_urlsafe(32)
            session = GatewaySession(
                id=token_digest(token), record=claim.record_id, task=claim.task.id, traj_id=claim.traj_id,
                attempt=claim.attempt, owner=claim.owner, models=("policy",), max_calls=10_000,
            )  # fmt: skip
            await self.store.gateways.open_session(session)
            found.append(f"{self.url}/t/{token}/v1/chat/completions")
        return found

    async def stream(self, url: str, messages: list[Any]) -> tuple[str, float]:
        """Make a streamed call; return its text and the seconds to the first of it."""
        began, first, texts = time.perf_counter(), 0.0, []
        body = {"model": "policy", "messages": messages, "stream": True}
        async with self.client.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                text = event["choices"][0]["delta"].get("content")
                if text and not first:
                    first = time.perf_counter() - began
                texts.append(text or "")
        return "".join(texts), first

    async def relayed(self, messages: list[Any]) -> None:
        """Make the same call through the relay."""
        body = {"model": "policy", "messages": messages, "stream": True}
        async with self.client.stream("POST", self.relay_url, json=body) as answer:
            async for _ in answer.aiter_lines():
                pass

    async def plain_first_token(self, tokens: int = 6000) -> float:
        """Return the seconds to the first token of the engine itself, whose answer is read to its end."""
        body = {"input_ids": [1] * tokens, "sampling_params": {}, "stream": True, "rid": secrets.token_hex(8)}
        began, first = time.perf_counter(), 0.0
        async with self.client.stream("POST", f"{self.engine_url}/generate", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and not first:
                    first = time.perf_counter() - began
        return first


async def contexts(bench: Bench, tokens: int, sizes: Sizes) -> list[Row]:
    """Measure the CPU time of calls in long conversations."""
    text = text_of(bench.model, sizes.tokens or tokens)
    urls = await bench.urls(sizes.conversations)
    conversations: list[list[Any]] = [[{"role": "user", "content": f"{n} {text}"}] for n in range(len(urls))]
    spent, relayed = [], []
    for turn in range(sizes.turns):
        began = bench.cpu()
        answers = await asyncio.gather(*map(bench.stream, urls, conversations))
        spent.append((bench.cpu() - began) / len(urls))
        began = bench.cpu(bench.relay)
        await asyncio.gather(*map(bench.relayed, conversations))
        relayed.append((bench.cpu(bench.relay) - began) / len(urls))
        for conversation, (said, _) in zip(conversations, answers, strict=True):
            result = f"result {turn}: " + " ".join(WORDS * 4)
            conversation += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
    name, limit = f"{tokens // 1000}K tokens", 1.5 if tokens < 50_000 else 2.0
    later, least = (_MILLI * statistics.mean(values[1:]) for values in (spent, relayed))
    return [
        Row(what=f"CPU of a call, against a relay that stores nothing, {name}", ours=f"{later:.2f} ms",
            baseline=f"{least:.2f} ms", ratio=later / least if least else None, target=limit, more=False),
        Row(what=f"CPU of a first call, {name}", ours=f"{_MILLI * spent[0]:.1f} ms", baseline="",
            ratio=None),
    ]  # fmt: skip


async def first_token(bench: Bench, sizes: Sizes) -> list[Row]:
    """Compare the time to the first token with the engine's, one call at a time, in alternation."""
    (url,) = await bench.urls(1)
    messages: list[Any] = [{"role": "user", "content": text_of(bench.model, sizes.tokens or 6000)}]
    ours, plain = [], []
    for turn in range(sizes.calls):
        said, first = await bench.stream(url, messages)
        ours.append(first)
        plain.append(await bench.plain_first_token())
        more = {"role": "user", "content": f"more {turn}"}
        messages += [{"role": "assistant", "content": said}, more]
    mine, theirs = (_MILLI * statistics.median(values[5:]) for values in (ours, plain))
    return [
        Row(what="time to the first token beyond the engine's, 6K tokens", ours=f"{mine:.1f} ms",
            baseline=f"{theirs:.1f} ms + 3 ms", ratio=mine / (theirs + 3.0), target=1.0, more=False),
    ]  # fmt: skip


async def streams(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure many streams at a time."""
    urls = await bench.urls(sizes.streams)
    text = text_of(bench.model, 1000)
    began, cpu = time.perf_counter(), bench.cpu()
    answers = await asyncio.gather(
        *(bench.stream(url, [{"role": "user", "content": f"{n} {text}"}]) for n, url in enumerate(urls))
    )
    seconds, cpu = time.perf_counter() - began, bench.cpu() - cpu
    different = len({said for said, _ in answers})
    memory = bench.gateway.memory_info().rss / 2**20
    began = time.perf_counter()
    await asyncio.gather(*(bench.plain_first_token(1000) for _ in range(sizes.streams)))
    plain = time.perf_counter() - began
    shown = f"{seconds:.1f} s, {_MILLI * cpu / sizes.streams:.1f} ms CPU each, {memory:.0f} MiB"
    return [
        Row(what=f"{sizes.streams} streams at a time, 1K tokens", ours=shown, baseline=f"{plain:.1f} s",
            ratio=seconds / plain, target=1.15, more=False),
        Row(what="different answers to the same request", ours=f"{different}", baseline="1",
            ratio=float(different), equal=0.0),
    ]  # fmt: skip


@asynccontextmanager
async def opened(uri: str, model: str, gap_ms: float) -> AsyncIterator[Bench]:
    """Start an engine and a gateway; end them."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(run_database(uri, "gateway"))
        engine = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / "gateway_engine.py"), model, str(gap_ms),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        stack.push_async_callback(_end, engine)
        assert engine.stdout is not None
        engine_url = f"http://127.0.0.1:{(await engine.stdout.readline()).decode().strip()}"
        await store.services.register(
            InferenceService(
                id="e", url=engine_url, engine="sglang", model=model, host="h", pid=1,
                status=ServiceStatus.READY, policy_version=0,
            )
        )  # fmt: skip
        logs = stack.enter_context(tempfile.TemporaryDirectory())
        url = "http://127.0.0.1:8797"
        flags = {
            "run_name": store.run_name, "db_connection_string": uri, "model_name_or_path": model,
            "max_prompt_tokens": 200_000, "max_model_len": 300_000, "heartbeat_seconds": 600,
            "log_dir": logs, "gateway_port": 8797,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()]
        gateway = await asyncio.create_subprocess_exec(sys.executable, "-m", "agentrl", "gateway", *words)
        stack.push_async_callback(_end, gateway)
        relay_url = "http://127.0.0.1:8798"
        relay = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / "gateway_relay.py"), engine_url, "8798"
        )
        stack.push_async_callback(_end, relay)
        client = await stack.enter_async_context(
            httpx2.AsyncClient(timeout=300, limits=httpx2.Limits(max_connections=512))
        )
        for _ in range(600):
            if await _is_up(client, url) and await _is_up(client, relay_url):
                break
            await asyncio.sleep(0.2)
        processes = psutil.Process(gateway.pid), f"{relay_url}/", psutil.Process(relay.pid)
        yield Bench(store, url, engine_url, model, *processes, client)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


async def _is_up(client: httpx2.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == 200
    except httpx2.TransportError:
        return False


async def measure(uri: str, model: str, names: list[str], sizes: Sizes) -> list[Row]:
    """Run the chosen measurements."""
    rows: list[Row] = []
    async with opened(uri, model, 1.0) as bench:
        for name in names:
            if name in ("6k", "75k"):
                rows += await contexts(bench, int(name[:-1]) * 1000, sizes)
            elif name == "first-token":
                rows += await first_token(bench, sizes)
        if "streams" in names and sizes == QUICK:
            return rows + await streams(bench, sizes)
    if "streams" in names:
        async with opened(uri, model, 20.0) as bench:
            rows += await streams(bench, sizes)
    return rows


def main(argv: list[str]) -> int:
    """Print a table; return 1 if a target is missed."""
    names = ["6k", "75k", "first-token", "streams"]
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--model", help="folder of a model with a context of 300,000 tokens")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with database() as (folder, uri):
        model = options.model or make_model(folder)
        rows = asyncio.run(measure(uri, model, options.only, QUICK if options.quick else Sizes()))
    return finish("gateway", rows, quick=options.quick, file=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
