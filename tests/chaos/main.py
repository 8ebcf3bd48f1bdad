"""Run a whole system while faults are injected at random; check that nothing is lost or trained twice.

    bash scripts/chaos.sh --minutes 10 --seed 7

The system has four samplers, two engines, a trainer, two processes that open epochs of many tasks, and
MongoDB. The seed determines the plan of faults. Processes and the database are killed and restarted, or
frozen longer than leases and timeouts. A frozen trainer is replaced by another. Connections are reset,
stalled and delayed. The trainer's disk is full. Published weights are damaged. Samplers store most token
arrays in GridFS, so that uploads are interrupted too. Every turn calls a tool whose effects cannot be taken
back: no call of it may run twice, and no stored turn may change when another sampler continues a trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from waiting import comes_true

from agentrl.base.concurrency import end_tasks
from agentrl.config.load import CommandParser
from agentrl.config.schema import RunConfig
from agentrl.errors import AgentRLError, ConfigError, StoreError
from agentrl.store.client import Store, open_store
from chaos.actors import Actor, watch
from chaos.chaos_run import LEASE_SECONDS, OPENINGS, RUN, ChaosRun
from chaos.container_kills import run_container_kills
from chaos.database import Database, SingleServer, ThreeServers
from chaos.drills import DRILLS, run_drills
from chaos.faults import Injector
from chaos.harness_kills import run_harness_kills
from chaos.journal import CallWatcher, Notes
from chaos.opener import SPLIT
from chaos.plan import Members, make_plan
from chaos.refusals import run_refusals
from chaos.report import Findings, Report, check_run, examine, examine_journals
from chaos.weight_delivery import run_weight_delivery

logger = logging.getLogger(__name__)

R = TypeVar("R")

READY_SECONDS = 300.0
"""Time limit of the first optimizer step, before any fault."""

FINISH_SECONDS = 300.0
"""Time limit of the rest of the last epoch, after the last fault."""

_HARNESS_TASKS = 48
_STOP_SECONDS = 60.0
_INTERRUPTED_SECONDS = 15.0
_PAGE = 1000
_POLL_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Run, print the report, and return 0 if there is no violation."""
    options = _parse(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s chaos  %(message)s")
    for name in ("pymongo", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="agentrl-chaos-"))
    folder = folder.resolve()
    if options.keep is not None and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--keep {folder} is not empty", hint="name a new folder")
    report = asyncio.run(_interruptible(_work(options, folder)))
    for line in report.lines():
        print(line)
    if report.violations or options.keep:
        print(f"logs and data: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if report.violations else 0


async def _work(options: Namespace, folder: Path) -> Findings:
    if options.weights is not None:
        return await run_weight_delivery(folder, options.weights, away=options.away, seed=options.seed)
    if options.harness is not None:
        return await run_harness_kills(folder, options.harness, tasks=_HARNESS_TASKS, seed=options.seed)
    if options.containers is not None:
        return await run_container_kills(folder, options.containers, seed=options.seed, generations=24)
    if options.refusals is not None:
        return await run_refusals(folder, options.refusals, tasks=240)
    if options.drills is None:
        return await run(options, folder)
    return await run_drills(folder, options.drills, [options.only] if options.only else DRILLS)


async def run(options: Namespace, folder: Path) -> Report:
    """Set up a run in ``folder``, inject faults, and return the report; stop everything at the end."""
    chaos_run = ChaosRun(folder=folder, seed=options.seed, tasks=options.tasks, seconds=60 * options.minutes)
    await asyncio.to_thread(chaos_run.prepare)
    single = SingleServer(folder / "mongo")
    database: Database = ThreeServers(folder / "mongo") if options.replica_set else single
    try:
        await database.start()
        async with await open_store(RunConfig(run_name=RUN, db_connection_string=database.uri)) as store:
            members = Members.of(samplers=4, engines=2, openers=2)
            actors = await chaos_run.make_actors(members, database)
            injector = Injector(actors, single.proxies, database, chaos_run.output / "weights", store)
            return await _run(options, chaos_run, members, injector, store, database.uri)
    finally:
        await database.stop()


async def _run(
    options: Namespace, chaos_run: ChaosRun, members: Members, injector: Injector, store: Store, uri: str
) -> Report:
    actors = list(injector.actors.values())
    calls = CallWatcher(store)
    watching = [asyncio.create_task(watch(actors)), asyncio.create_task(calls.run())]
    plan = make_plan(
        seed=options.seed, seconds=60 * options.minutes, gap=options.gap, lease_seconds=LEASE_SECONDS,
        members=members, replica_set=options.replica_set,
    )  # fmt: skip
    try:
        for actor in actors:
            if actor.role != "opener":
                actor.start()
        await _reach(lambda: _has_trained(store), READY_SECONDS, "no step was trained")
        for name in members.openers:
            injector.actors[name].start()
        logger.info("the first step is trained; %d faults in %g minutes", len(plan), options.minutes)
        started = time.monotonic()
        await injector.run(plan, 60 * options.minutes)
        await asyncio.sleep(max(0.0, started + 60 * options.minutes - time.monotonic()))
        seconds = time.monotonic() - started
        watching[0].cancel()
        finished = await _finish(store, injector.actors)
        if watching[1].done():  # it ends by an error alone
            await watching[1]
    finally:
        await end_tasks(*watching)
        await asyncio.gather(*(actor.stop(_INTERRUPTED_SECONDS) for actor in actors))
    exits = [exit for actor in actors for exit in actor.exits]
    report = Report(faults=injector.done, exits=exits, seconds=seconds, finished=finished)
    await examine(store, chaos_run.logs, report)
    await examine_journals(store, Notes(chaos_run.notes), calls, report)
    check_run(chaos_run.check_command(uri, is_final=False), report)
    await _remove_openings(store)
    check_run(chaos_run.check_command(uri, is_final=True), report)
    return report


async def _finish(store: Store, actors: Mapping[str, Actor]) -> bool:
    """Let the run complete: restart samplers and trainer with the number of epochs begun so far.

    They end by themselves once every task is sampled and trained. Returns False if one fails or does not end.
    """
    workers = [actor for actor in actors.values() if actor.role in ("sampler", "trainer")]
    openers = [actor for actor in actors.values() if actor.role == "opener"]
    await asyncio.gather(*(actor.stop(_STOP_SECONDS) for actor in (*workers, *openers)))
    for opener in openers:
        opener.command = [*opener.command, "--openings_pause", "0.5"]
    epochs = max(await store.tasks.epochs("train"), default=0) + 1
    logger.info("no more faults; the run continues to the end of its %d epochs", epochs)
    for actor in actors.values():
        if actor in workers:
            actor.command = [*actor.command, "--num_train_epochs", str(epochs)]
        if actor.pid is None:
            actor.start()
    deadline = time.monotonic() + FINISH_SECONDS
    while any(actor.pid is not None for actor in workers) or await _is_opening(store):
        if time.monotonic() > deadline or any(actor.has_failed for actor in workers):
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


async def _has_trained(store: Store) -> bool:
    return bool(await store.steps.find())


async def _remove_openings(store: Store) -> None:
    """Delete the split that was opened and never sampled: the final check expects no open slot."""
    tasks = store.database["Task"]
    while page := await tasks.find({"split": SPLIT}, {"_id": 1}, limit=_PAGE).to_list():
        await tasks.delete_many({"_id": {"$in": [task["_id"] for task in page]}})
    await store.database["Epoch"].delete_many({"_id": {"$regex": f"^{SPLIT}/"}})


async def _is_opening(store: Store) -> bool:
    return await store.epochs.next(SPLIT, OPENINGS) is not None


async def _reach(condition: Callable[[], Awaitable[bool]], seconds: float, otherwise: str) -> None:
    """Wait until ``condition`` is true. Raises AgentRLError after ``seconds``."""

    async def holds() -> bool:
        with suppress(StoreError):
            return await condition()
        return False

    if not await comes_true(holds, seconds, _POLL_SECONDS):
        raise AgentRLError(f"{otherwise} within {seconds:g} s", hint="see the logs")


async def _interruptible(work: Coroutine[None, None, R]) -> R:
    """Return the result of ``work``; SIGTERM cancels it, so that it stops its processes."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _parse(argv: list[str]) -> Namespace:
    parser = CommandParser(prog="bash scripts/chaos.sh", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of the faults (%(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the plan and of the run (%(default)s)")
    parser.add_argument("--gap", type=float, default=6.0, help="mean seconds between faults (%(default)g)")
    opened = "tasks whose epochs are opened during faults (%(default)s)"
    parser.add_argument("--tasks", type=int, default=2000, help=opened)
    parser.add_argument(
        "--replica_set", action="store_true", help="three mongods; the primary is killed often"
    )
    parser.add_argument("--only", choices=DRILLS, help="with --drills: the outage of this service alone")
    parser.add_argument("--keep", type=Path, help="run in this folder, and keep it")
    for name, what in {
        "drills": "an outage of each service, so long",
        "refusals": "a dead manager, and a judge that refuses 480 slots so long",
        "containers": "samplers and mongod are killed so long under 16 trajectories in containers",
        "harness": "gateway, harnesses, samplers and mongod are killed so long under 16 harnesses",
        "weights": "trainer and engines are killed so long while weights travel over an S3 server",
    }.items():
        parser.add_argument(f"--{name}", type=float, metavar="SECONDS", help=f"instead: {what}")
    parser.add_argument(
        "--away", type=float, default=60.0, metavar="SECONDS",
        help="with --weights: how long the bucket is away in turns (%(default)g)",
    )  # fmt: skip
    options: Namespace = parser.parse_args(argv)
    if options.minutes <= 0 or options.gap <= 0 or options.tasks <= 0:
        given = f"--minutes is {options.minutes:g}, --gap is {options.gap:g}, --tasks is {options.tasks}"
        raise ConfigError(given, hint="give values above 0")
    return options
