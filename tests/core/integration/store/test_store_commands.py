"""What the store asks of the server: each query of a loop has an index, and an idle run costs little."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pymongo.monitoring
import pytest
from ready_data import finalize, ready_data
from rollout_fakes import FakeTools
from test_store_claims import expire, make_tasks, take_one
from test_store_training import complete, decide, make_call, make_step

from agentrl.columns.outages import Outages
from agentrl.columns.scores import Scoring
from agentrl.config.schema import ClaimConfig, GroupConfig, RunConfig, SamplingConfig, TrainConfig
from agentrl.data.stream import DataStream, Freshness, StreamSettings
from agentrl.documents.record import Failure
from agentrl.documents.run import InferenceService
from agentrl.documents.status import RecordStatus, ServiceStatus, TaskStatus
from agentrl.rollout.housekeeping import EpochPlan, GroupFinalizer
from agentrl.rollout.sampler import Sampler, SamplerConfig
from agentrl.rollout.setup import AdmissionLimit
from agentrl.store.claims import GroupLimit
from agentrl.store.client import Store, open_store
from agentrl.store.schema import INDEXES
from agentrl.store.steps import StaleVersions

pytestmark = pytest.mark.integration

_QUERIES = ("find", "aggregate", "count", "distinct", "findAndModify", "update", "delete")
_OF_THE_SESSION = (
    "lsid", "$clusterTime", "$db", "$readPreference", "txnNumber", "autocommit", "startTransaction",
    "readConcern", "writeConcern", "maxTimeMS", "ordered", "bypassDocumentValidation", "cursor",
)  # fmt: skip
WARM_UP_SECONDS = 3.0
IDLE_SECONDS = 12.0
IDLE_OPERATIONS_A_SECOND = 3.0


Command = tuple[str, dict[str, Any]]


class Commands(pymongo.monitoring.CommandListener):
    """Keeps what is sent to the databases that are being recorded."""

    def __init__(self) -> None:
        self.recorded: dict[str, list[Command]] = {}

    def record(self, store: Store) -> None:
        """Record the store's database from now on."""
        self.recorded[store.run_name] = []

    def stop(self, store: Store) -> list[Command]:
        """Record the store's database no longer; return what was sent to it."""
        return self.recorded.pop(store.run_name)

    def started(self, event: pymongo.monitoring.CommandStartedEvent) -> None:
        """Keep the command."""
        if event.database_name in self.recorded:
            self.recorded[event.database_name].append((event.command_name, dict(event.command)))

    def succeeded(self, event: pymongo.monitoring.CommandSucceededEvent) -> None:
        """Nothing is kept of answers."""

    def failed(self, event: pymongo.monitoring.CommandFailedEvent) -> None:
        """Nothing is kept of answers."""


COMMANDS = Commands()
pymongo.monitoring.register(COMMANDS)


@pytest.fixture
async def watched(run_config: RunConfig) -> AsyncIterator[Store]:
    """A store whose commands are kept once ``COMMANDS.record`` is called."""
    async with await open_store(run_config) as store:
        yield store
        COMMANDS.recorded.clear()
        await store.database.client.drop_database(run_config.run_name)


def queries(sent: list[Command]) -> Iterator[dict[str, Any]]:
    """Every query that was sent, as a command that can be explained; each update of a batch by itself."""
    for name, command in sent:
        bare = {key: value for key, value in command.items() if key not in _OF_THE_SESSION}
        if name not in _QUERIES or "$changeStream" in str(command.get("pipeline", ""))[:40]:
            continue
        for part in ("updates", "deletes"):
            if part in bare:
                yield from ({**bare, part: [one]} for one in bare[part])
                break
        else:
            yield {**bare, "cursor": {}} if name == "aggregate" else bare


def stages(plan: Any) -> Iterator[str]:
    """The names of all stages of the winning plans in an answer of ``explain``."""
    if isinstance(plan, list):
        for item in plan:
            yield from stages(item)
    elif isinstance(plan, dict):
        if isinstance(plan.get("stage"), str):
            yield plan["stage"]
        if "$sort" in plan:
            yield "SORT"
        for key, value in plan.items():
            if key not in ("rejectedPlans", "parsedQuery", "command"):
                yield from stages(value)


async def everything_that_runs_in_a_loop(store: Store) -> None:
    """One turn of each loop of samplers, engines, trainer and housekeeping."""
    claims, attempts, records, tasks, training = (
        store.claims, store.attempts, store.records, store.tasks, store.training
    )  # fmt: skip
    failure = Failure(kind="engine", message="x")
    for limit in (None, 50):
        claim = await claims.claim(split="train", owner="a", lease_seconds=60, max_groups_open=limit)
        assert claim is not None
        await records.create(claim)
        await records.advance(claim, RecordStatus.RUNNING)
        await store.model_calls.add(claim, make_call(claim, 0))
        await claims.heartbeat([claim], 60)
        await (
            attempts.release(claim)
            if limit
            else attempts.fail(claim, failure, max_attempts=3, backoff_seconds=9)
        )
    for _ in range(2):
        assert await claims.claim(split="train", owner="a", lease_seconds=60, max_groups_open=50) is not None
    await take_one(store, "dead", lease=0.0)
    await store.expired_leases.reap("train")
    await take_one(store, "dead", lease=0.0)
    assert await claims.claim(split="train", owner="b", lease_seconds=60, max_groups_open=0) is not None
    await store.groups.waiting("train")
    await tasks.any_with_status("train", TaskStatus.CREATED, TaskStatus.RUNNING, TaskStatus.WAITING)
    await tasks.unfinished("train")
    await tasks.epochs("train")
    await store.groups.count_open("train")
    await store.groups.uncounted("train")
    for ranges in (((0, -1),), ((-4, -3), (-1, -1))):
        for spans in ("any", "all"):
            old = StaleVersions(ranges, spans)
            await training.mark_stale("train", old)
            await training.ready_members("train", step=1, old=old)
    ready = (await ready_data(store, "train", step=1))[:8]
    await tasks.sort_keys([meta.task for meta in ready])
    await training.fetch([meta.id for meta in ready])
    await training.mean_generated_tokens(tasks=[ready[0].task])
    await training.mean_generated_tokens(records=[ready[0].record])
    attempt = await store.trainer_lease.acquire("t", "host", os.getpid(), 60)
    await store.trainer_lease.renew(attempt, 60)
    ids, counted = [meta.id for meta in ready], [meta.task for meta in ready]
    await store.steps.plan(make_step(1, ids, str(attempt)), attempt=attempt)
    await store.steps.commit(f"{attempt}/1", {}, ids, attempt=attempt, counted=counted)
    await store.steps.last()
    await store.policy_versions.latest()
    await store.policy_versions.newest_id()
    await store.policy_versions.steps_above(-1)
    await store.policy_versions.published(2, below=9)
    await store.policy_versions.withdrawn(1)
    await store.policy_versions.withdraw_after(1)
    await store.services.beat("e", status=ServiceStatus.READY, policy_version=0, running_requests=0)
    await store.services.live(30)
    await store.trainer_lease.read()


async def test_every_query_that_runs_in_a_loop_uses_an_index(watched: Store) -> None:
    service = InferenceService(id="e", url="http://x", engine="local", model="m", host="h", pid=1)
    await watched.services.register(service)
    for number in range(3):
        await complete(watched, number)
    await watched.tasks.load(make_tasks(40)[3:])
    await watched.trainer_lease.acquire("t", "host", os.getpid(), 60)  # the first one reads earlier steps
    COMMANDS.record(watched)
    for task_id in await watched.groups.waiting("train"):
        await finalize(watched, task_id, decide)
    await everything_that_runs_in_a_loop(watched)
    explained = set()
    for query in queries(COMMANDS.stop(watched)):
        plan = await watched.database.command({"explain": query, "verbosity": "queryPlanner"})
        found = set(stages(plan))
        assert found, query
        assert found.isdisjoint({"COLLSCAN", "SORT"}), (query, found)
        name = next(iter(query))
        explained.add((name, query[name]))
    assert {
        ("findAndModify", "Task"),
        ("find", "DBRecordData"),
        ("distinct", "Task"),
        ("update", "Admission"),
    } <= explained
    assert len(explained) >= 18


async def test_whoever_claims_a_slot_sorts_as_its_index_does(watched: Store) -> None:
    """Else all open groups are read for one claim: of few, as in a test, another index may hide it."""
    await watched.tasks.load(make_tasks(4, generations=1))
    COMMANDS.record(watched)
    sampled = await take_one(watched)
    await watched.records.create(sampled)
    await watched.records.advance(sampled, RecordStatus.RUNNING)
    await watched.records.advance(sampled, RecordStatus.COMPLETED)
    await expire(watched, sampled)
    await asyncio.gather(*(take_one(watched) for _ in range(3)))
    assert await watched.claims.claim_sampled(split="train", owner="b", lease_seconds=60.0)
    sorts = {
        tuple(command["sort"].items())
        for name, command in COMMANDS.stop(watched)
        if command.get(name) == "Task" and "sort" in command
        and "slots.status" in command.get("query", command.get("filter", {}))
    }  # fmt: skip
    (keys,) = [
        tuple(index.document["key"].items())[3:] for index in INDEXES["Task"]
        if "slots.status" in index.document["key"]
    ]  # fmt: skip
    assert sorts == {keys}


async def end_leases(store: Store, slot: int) -> None:
    """The leases of this slot of two tasks have run out."""
    async for task in store.database["Task"].find({"order": {"$in": [3, 9]}}):
        ended = {f"slots.{slot}.lease_expires_at": task["created_at"], "lease_deadline": task["created_at"]}
        await store.database["Task"].update_one({"_id": task["_id"]}, {"$set": ended})


async def test_a_look_for_leases_that_ran_out_reads_no_task_whose_leases_run(watched: Store) -> None:
    """However many groups are being sampled, ``reap`` and a take-over read what is overdue."""
    await watched.tasks.load(make_tasks(50))
    for _ in range(40 * 2):
        await take_one(watched, "alive", lease=600)
    await end_leases(watched, 0)
    sampled = {"status": "running", "slots.$[].status": "sampled", "lease_deadline": None}
    await watched.database["Task"].update_many({"order": {"$gte": 40}}, {"$set": sampled})
    COMMANDS.record(watched)
    assert await watched.expired_leases.reap("train") == 2
    await take_one(watched, "other", lease=600)
    await take_one(watched, "other", lease=600)
    await end_leases(watched, 1)
    assert (await take_one(watched, "heir", lease=600)).attempt == 2
    sent = COMMANDS.stop(watched)
    await end_leases(watched, 1)
    filters = [(query, str(query.get("filter", query.get("query")))) for query in queries(sent)]
    looks = [query for query, condition in filters if "lease_deadline" in condition]
    assert {next(iter(look)) for look in looks} == {"find", "findAndModify"}
    for look in looks:
        plan = await watched.database.command({"explain": look, "verbosity": "executionStats"})
        assert 1 <= plan["executionStats"]["totalDocsExamined"] <= 2, look


class NoWorker:
    """Nothing is ever claimed, so nothing is ever run."""

    def __init__(self, store: Store) -> None:
        self.outages = Outages()
        self.stop = asyncio.Event()
        self.snapshots = None
        self.tools = FakeTools()
        self.snapshots = None
        self.sampling = SamplingConfig()
        self.scoring = Scoring(
            store=store, outages=self.outages, sampling=self.sampling, claims=ClaimConfig()
        )

    async def run(self, claim: object) -> bool:
        raise AssertionError("an idle sampler claims nothing")


async def idle_run(store: Store, trainer_side: Store) -> list[str]:
    """What a sampler with nothing to claim and a trainer with nothing to train send in ``IDLE_SECONDS``."""
    admission = AdmissionLimit(SamplingConfig(), TrainConfig())

    async def allowed() -> GroupLimit:
        return await admission.groups_allowed(store, ())

    config = SamplerConfig(
        split="train", owner="idle", concurrency=4, claims=ClaimConfig(),
        plan=EpochPlan(epochs=1, seed=0, num_generations=2, shuffle=False),
    )  # fmt: skip
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    sampler = Sampler(store, NoWorker(store), finalizer, config, allowed)  # type: ignore[arg-type]
    settings = StreamSettings(
        groups_per_step=2,
        num_epochs=1,
        freshness=Freshness(max_staleness=1),
        wait_seconds=600,
    )
    stop = asyncio.Event()
    sampling = asyncio.create_task(sampler.run(stop))
    taking = asyncio.create_task(DataStream(trainer_side, settings).take(1))
    await asyncio.sleep(WARM_UP_SECONDS)
    COMMANDS.record(store)
    await asyncio.sleep(IDLE_SECONDS)
    sent = [name for name, _ in COMMANDS.stop(store)]
    assert not sampling.done()
    assert not taking.done()
    stop.set()
    taking.cancel()
    await asyncio.gather(sampling, taking, return_exceptions=True)
    return sent


async def idle_commands(run: RunConfig, *, tasks: int) -> list[str]:
    """The commands of an idle run of ``tasks``, all of whose claims within the limit are taken."""
    async with await open_store(run) as watched, await open_store(run) as trainer_side:
        if tasks:
            await watched.tasks.load(make_tasks(tasks))
        while tasks and (
            await watched.claims.claim(split="train", owner="busy", lease_seconds=600, max_groups_open=36)
        ):
            pass
        try:
            return await idle_run(watched, trainer_side)
        finally:
            await watched.database.client.drop_database(run.run_name)


async def test_an_idle_sampler_and_an_idle_trainer_cost_little(run_config: RunConfig) -> None:
    numbers = {"no tasks": 0, "every slot taken": 2, "no room": 40}
    runs = [
        idle_commands(replace(run_config, run_name=f"{run_config.run_name}_{number}"), tasks=number)
        for number in numbers.values()
    ]
    for idle, sent in zip(numbers, await asyncio.gather(*runs), strict=True):
        assert len(sent) / IDLE_SECONDS < IDLE_OPERATIONS_A_SECOND, (idle, sent)
