"""Run one scaling workload with the sources of one commit, and print its cost as a line of JSON.

    python scripts/bench/store_scale_child.py WORKLOAD URI OPTIONS

``store_scale.py`` starts it with that commit's ``src`` on PYTHONPATH. The other commit must have the modules
and the store calls that this file uses.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import psutil
import pymongo.monitoring
from pymongo import AsyncMongoClient
from store_fixtures import SPLIT, make_call, make_tasks

from agentrl.base.concurrency import background
from agentrl.config.schema import AgentConfig, ClaimConfig, GroupConfig, RunConfig, SamplingConfig, ToolConfig
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus, TaskStatus
from agentrl.documents.task import Claim
from agentrl.rollout import sampler as sampler_module
from agentrl.rollout.housekeeping import EpochPlan, GroupFinalizer
from agentrl.rollout.sampler import Sampler, SamplerConfig
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics.connection import Connection
from agentrl.tools.pool import ToolPool

_LEASE = 60.0
_MAX_GROUPS_OPEN = 100_000
_TIMEOUT = 120.0
_CONNECTIONS_AT_ONCE = 16
_POLL_SECONDS = 0.05
_RENEWED_AT_ONCE = 8


class Commands(pymongo.monitoring.CommandListener):
    """Count the commands and the reads of a group's Records. Covers clients opened after registration."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def started(self, event: pymongo.monitoring.CommandStartedEvent) -> None:
        """Count the command."""
        self.sent[event.command_name] += 1
        if event.command.get("find") == "Record" and "task" in event.command.get("filter", {}):
            self.sent["reads of a group"] += 1

    def succeeded(self, event: pymongo.monitoring.CommandSucceededEvent) -> None:
        """Do nothing: replies are not counted."""

    def failed(self, event: pymongo.monitoring.CommandFailedEvent) -> None:
        """Do nothing: replies are not counted."""

    def total(self) -> int:
        """Return the number of commands without ``getMore``."""
        return sum(self.sent.values()) - self.sent["reads of a group"] - self.sent["getMore"]


COMMANDS = Commands()


class SimulatedWorker(Worker):
    """Simulates trajectories with one model call and no engine. Each lasts ``seconds`` on average."""

    def __init__(self, store: Store, seconds: float) -> None:
        nothing: Any = None
        super().__init__(
            store=store, router=nothing, tools=ToolPool(ToolConfig()), chat_format=nothing,
            params=SamplingParams(), seed=0, agent=AgentConfig(), sampling=SamplingConfig(),
            claims=ClaimConfig(lease_seconds=_LEASE),
        )  # fmt: skip
        self._seconds = seconds
        self._is_first = True
        self.scored = 0

    async def run(self, claim: Claim) -> bool:
        """Write one trajectory from Record to score."""
        records, least = self.store.records, 0.0 if self._is_first else 0.5
        self._is_first = False
        await records.create(claim)
        await records.advance(claim, RecordStatus.RUNNING)
        await asyncio.sleep(self._seconds * random.uniform(least, least + 1))
        await self.store.model_calls.add(claim, make_call(claim.record_id, 0, context=64, output=8))
        await records.advance(claim, RecordStatus.COMPLETED, final_answer="1889", stop_reason="answered")
        await records.advance(claim, RecordStatus.SCORING)
        await self.store.attempts.score(claim, float(random.random() < 0.5))
        self.scored += 1
        return True


def run_config(uri: str, name: str) -> RunConfig:
    """Return the configuration of the run ``name``."""
    return RunConfig(run_name=name, db_connection_string=uri, db_timeout_seconds=_TIMEOUT)


def make_sampler(
    store: Store, worker: SimulatedWorker, owner: str, concurrency: int, generations: int
) -> Sampler:
    """Return a sampler whose group limit is never reached."""

    async def allowed() -> int:
        return _MAX_GROUPS_OPEN

    plan = EpochPlan(epochs=1, seed=0, num_generations=generations, shuffle=False)
    config = SamplerConfig(
        split=SPLIT, owner=owner, concurrency=concurrency, claims=ClaimConfig(lease_seconds=_LEASE), plan=plan
    )
    return Sampler(store, worker, GroupFinalizer(store, GroupConfig(), split=SPLIT, seed=0), config, allowed)


async def admission(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """Measure claims per second and commands per claim, where every group passes admission."""
    found = {}
    for name, (clients, claimers, generations) in options["settings"].items():
        async with AsyncExitStack() as stack:
            run = run_config(uri, f"{options['run']}_{clients}_{claimers}")
            stores = [await stack.enter_async_context(await open_store(run)) for _ in range(clients)]
            await stores[0].tasks.load(
                make_tasks(options["tasks"] * (1 if generations == 8 else 2), generations)
            )
            before = COMMANDS.total()
            claims, seconds = await _claim_for(stores, claimers, options["seconds"])
            found[name] = {"rate": claims / seconds, "commands": (COMMANDS.total() - before) / claims}
            await stores[0].database.client.drop_database(run.run_name)
    return found


async def _claim_for(stores: list[Store], claimers: int, seconds: float) -> tuple[int, float]:
    """Claim for ``seconds``. Return the claimed slots and the seconds until the last claimer ended."""
    began = time.perf_counter()

    async def claimer(store: Store, owner: str) -> int:
        claimed = 0
        while time.perf_counter() - began < seconds:
            claim = await store.claims.claim(
                split=SPLIT, owner=owner, lease_seconds=600.0, max_groups_open=_MAX_GROUPS_OPEN
            )
            claimed += claim is not None
        return claimed

    counts = await asyncio.gather(
        *(claimer(store, f"c{number}") for store in stores for number in range(claimers))
    )
    return sum(counts), time.perf_counter() - began


async def finalizing(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """Count reads per group and commands per trajectory, from the first claim to the last finalized group."""
    samplers, groups = options["samplers"], options["groups"]
    watching: AsyncMongoClient[dict[str, Any]] = options["uncounted"]
    tasks = watching[options["run"]]["Task"]
    async with AsyncExitStack() as stack:
        run = run_config(uri, options["run"])
        stores = [await stack.enter_async_context(await open_store(run)) for _ in range(samplers)]
        await stores[0].tasks.load(make_tasks(groups))
        COMMANDS.sent.clear()
        workers = [SimulatedWorker(store, options["seconds"]) for store in stores]
        made = [
            make_sampler(store, worker, f"s{number}", 64 // samplers, 8)
            for number, (store, worker) in enumerate(zip(stores, workers, strict=True))
        ]
        async with background(*(sampler.run(asyncio.Event()) for sampler in made)):
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                if await tasks.count_documents({"status": TaskStatus.COMPLETED.value}) == groups:
                    break
            found = {
                "reads": COMMANDS.sent["reads of a group"] / groups,
                "commands": COMMANDS.total() / sum(worker.scored for worker in workers),
            }
        await watching.drop_database(run.run_name)
    return found


async def streams(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """Measure mongod's CPU microseconds per lease of ``renewals`` while ``waiting`` stores await changes."""
    renewals = options["renewals"]
    async with AsyncExitStack() as stack:
        run = run_config(uri, options["run"])
        store = await stack.enter_async_context(await open_store(run))
        await store.tasks.load(make_tasks(8))
        claims = [await store.claims.claim(split=SPLIT, owner="a", lease_seconds=600.0) for _ in range(64)]
        held = [claim for claim in claims if claim is not None]
        waiting = [
            await stack.enter_async_context(Store(Connection(uri, run.run_name, _TIMEOUT)))
            for _ in range(options["waiting"])
        ]
        async with background(*(each.wait_for_change("Task", timeout=3600.0) for each in waiting)):
            await asyncio.sleep(options["opening"])
            status = await store.database.client.admin.command("serverStatus")
            mongod = psutil.Process(status["pid"])
            began = mongod.cpu_times()
            for number in range(renewals // _RENEWED_AT_ONCE):
                first = number * _RENEWED_AT_ONCE % len(held)
                await store.claims.heartbeat(held[first : first + _RENEWED_AT_ONCE], 600.0)
            ended = mongod.cpu_times()
        await store.database.client.drop_database(run.run_name)
    return {"microseconds": 1e6 * (ended.user + ended.system - began.user - began.system) / renewals}


async def prepare(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """Create the run that samplers join."""
    async with await open_store(run_config(uri, options["run"])) as store:
        await store.tasks.load(make_tasks(options["groups"]))
    return {}


async def join(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run samplers, one client each. Print ``ready``, then measure between two lines on stdin."""
    claimed: list[float] = []
    stores = [Store(Connection(uri, options["run"], _TIMEOUT)) for _ in range(options["samplers"])]
    gate = asyncio.Semaphore(_CONNECTIONS_AT_ONCE)
    # Let the process collect its garbage, not each of its samplers.
    sampler_module.collect_while_idle = asyncio.Event().wait  # type: ignore[assignment]

    async def connect(store: Store) -> None:
        async with gate:
            await store.trainer_lease.read()

    await asyncio.gather(*map(connect, stores))
    workers = [SimulatedWorker(store, options["seconds"]) for store in stores]
    running = []
    for number, (store, worker) in enumerate(zip(stores, workers, strict=True)):
        store.claims.claim = _timed(store.claims.claim, claimed)  # type: ignore[method-assign]
        sampler = make_sampler(store, worker, f"{os.getpid()}-{number}", 1, 8)
        running.append(asyncio.create_task(_start(sampler, options["start"])))
    await _announce("ready")
    claimed.clear()
    COMMANDS.sent.clear()
    scored = sum(worker.scored for worker in workers)
    await _announce("measuring")
    scored = sum(worker.scored for worker in workers) - scored
    ended = [task for task in running if task.done()]
    return {"scored": scored, "commands": COMMANDS.total(), "claims": claimed, "ended": len(ended)}


async def _start(sampler: Sampler, seconds: float) -> None:
    """Run the sampler after a random delay of up to ``seconds``."""
    await asyncio.sleep(random.uniform(0, seconds))
    await sampler.run(asyncio.Event())


async def _announce(phase: str) -> None:
    """Print the phase and wait for a line on stdin."""
    print(phase, flush=True)
    await asyncio.to_thread(sys.stdin.readline)


def _timed(claim: Callable[..., Awaitable[Claim | None]], seconds: list[float]) -> Any:
    """Wrap ``claim`` so that the seconds of each successful claim are appended to ``seconds``."""

    async def timed(**request: Any) -> Claim | None:
        began = time.perf_counter()
        claimed = await claim(**request)
        if claimed is not None:
            seconds.append(time.perf_counter() - began)
        return claimed

    return timed


async def _main() -> None:
    workload, uri, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    options["uncounted"] = AsyncMongoClient(uri)
    pymongo.monitoring.register(COMMANDS)
    workloads: dict[str, Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
        "admission": admission, "finalizing": finalizing, "streams": streams, "prepare": prepare,
        "join": join,
    }  # fmt: skip
    print(json.dumps(await workloads[workload](uri, options)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_main())
