"""What somebody who holds a sampler's password can do: every line that docs/operations.md says of it."""

from __future__ import annotations

import contextvars
import dataclasses
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import small_run as run
from db_command import agentrl_db
from pymongo.asynchronous.database import AsyncDatabase
from ready_data import ready_data

import agentrl
from agentrl.base.user_code import allow
from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.data.finalize_group import GroupRules, finalize_group, verifier
from agentrl.documents.model_call import pack_ids
from agentrl.documents.record import GatewaySession
from agentrl.documents.run import Evaluation
from agentrl.documents.status import EvaluationStatus
from agentrl.documents.task import task_key
from agentrl.environments.environment import open_environment
from agentrl.errors import ConfigError, StoreError, TaskEnvironmentError
from agentrl.gateway.feedback import require_rule
from agentrl.scoring.scorers import SCORERS
from agentrl.store.client import Store, open_existing

pytestmark = pytest.mark.integration

DOCUMENTED = Path(agentrl.__file__).parents[2] / "docs" / "operations.md"
Json = dict[str, Any]
Database = AsyncDatabase[Json]
Attempts = Callable[[Database], list[Awaitable[object]]]
FIRST = f"{run.READY}/0/1"
FAR = datetime(2099, 1, 1, tzinfo=UTC)


def evaluation(status: str, **fields: Any) -> Json:
    """The document of an evaluation of version 1."""
    return Evaluation(
        id="e", status=EvaluationStatus(status), version=1, step=1, model=None, file="e.jsonl",
        tasks_digest="x", settings_digest="y", samples=1, right_threshold=0.5, **fields,
    ).to_document()  # fmt: skip


@pytest.fixture
async def thief(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Store]:
    """The run through the sampler's user; ``store`` is the administrator's view of it."""
    await run.build(store, tmp_path / "weights", unfinished=False)
    await store.trainer_lease.acquire("trainer", "host", 1, 60)
    await store.settings.begin("tasks", {"num_generations": 2}, "train")
    assert await agentrl_db(run_config, "users", "--create") == 0
    found = re.search(r"^agentrl_sampler +made +(\S+)$", capsys.readouterr().out, re.MULTILINE)
    async with await open_existing(dataclasses.replace(run_config, db_connection_string=found[1])) as opened:
        yield opened
    for role in ("sampler", "trainer", "engine", "auditor", "annotator"):
        await store.database.command("dropUser", f"agentrl_{role}")
        await store.database.command("dropRole", f"agentrl_{role}")


def test_every_line_is_documented() -> None:
    section = DOCUMENTED.read_text(encoding="utf-8").partition("stolen sampler credential")[2]
    lines = set(re.findall(r"^- (.+)$", section.partition("\n## ")[0], re.MULTILINE))
    assert {line.partition(":")[0] for line in lines} == {*REFUSED, *REFUSED_BY_READERS, *ALLOWED}


REFUSED: dict[str, Attempts] = {
    "take or hold the trainer's lease, or fence the trainer out": lambda d: [
        d["TrainerLease"].update_one({}, {"$inc": {"attempt": 1}}),
        d["TrainerLease"].update_one({}, {"$set": {"owner": "me"}}),
        d["TrainerLease"].insert_one({"_id": "trainer"}),
        d["TrainerLease"].delete_many({}),
    ],
    "change the schema version, or mark an import": lambda d: [
        d["Run"].update_one({"_id": "schema"}, {"$set": {"version": 9}}),
        d["Run"].update_one({"_id": "schema"}, {"$set": {"importing": True}}),
        d["Run"].insert_one({"_id": "schema", "importing": True}),
    ],
    "list a module for samplers to import": lambda d: [
        d["Imports"].insert_one({"_id": "imports", "paths": ["sys:exit"]}),
        d["Imports"].update_one({}, {"$set": {"paths": ["sys:exit"]}}, upsert=True),
    ],
    "publish, withdraw or change a policy version": lambda d: [
        d["PolicyVersion"].insert_one({"_id": 9}),
        d["PolicyVersion"].update_one({}, {"$set": {"status": "withdrawn"}}),
    ],
    "write a training step": lambda d: [
        d["TrainStep"].insert_one({"_id": "9/9"}),
        d["TrainStep"].update_one({}, {"$set": {"status": "reverted"}}),
        d["TokenStatistics"].insert_one({"_id": "x"}),
    ],
    "register an engine, or change the url of one": lambda d: [
        d["InferenceService"].insert_one({"_id": "e"}),
        d["InferenceService"].update_one({}, {"$set": {"url": "http://me"}}),
    ],
    "change training data that are stored": lambda d: [
        d["DBRecordData"].update_one({}, {"$set": {"advantage": 9.0}}),
        d["DBRecordData"].delete_many({}),
    ],
    "change what the run was begun with": lambda d: [
        d["Settings"].update_one({}, {"$set": {"values": {}}}),
    ],
    "delete any document but a model call, drop a collection, change a validator or an index": lambda d: [
        *(d[name].delete_many({}) for name in ("Task", "Record", "DBRecordData", "Admission")),
        d["Task"].drop(),
        d.command("collMod", "Record", validator={}),
        d["Task"].drop_indexes(),
        d.client.drop_database(d.name),
    ],
    "read or write another run": lambda d: [
        d.client["other"]["Task"].find_one({}),
        d.client["other"]["Task"].insert_one({}),
    ],
    "manage users": lambda d: [
        d.command("createUser", "me", pwd="x", roles=[]),
        d.command("updateUser", "agentrl_sampler", roles=[{"role": "root", "db": "admin"}]),
        d.command("usersInfo", 1),
    ],
    "run JavaScript in the server": lambda d: [
        d["Task"].find_one({"$where": "sleep(10000)"}),
        (d["Task"].find_one({"$expr": {"$function": {"body": "f()", "args": [], "lang": "js"}}})),
    ],
    "store a document that a validator refuses": lambda d: [
        d["Record"].insert_one({"_id": "x", "unknown": 1}),
        d["Record"].insert_one({"_id": "x", "unknown": 1}, bypass_document_validation=True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
async def test_the_server_refuses_it(thief: Store, line: str) -> None:
    for attempt in REFUSED[line](thief.database):
        with pytest.raises(Exception, match=r"not authorized|failed validation|(?i:script)"):
            await attempt


Trick = Callable[[Store, Store], Awaitable[None]]


async def _change_a_score(thief: Store, store: Store) -> None:
    ready = (await ready_data(store, "train"))[0]
    await thief.database["Record"].update_one({"_id": ready.id}, {"$set": {"score": 9.0}})
    problems = await verifier(store)(await store.training.fetch([ready.id]))
    assert "has the score 9.0" in problems[ready.task]


async def _change_a_call(thief: Store, store: Store) -> None:
    ready = (await ready_data(store, "train"))[0]
    other = {"$set": {"output_ids": pack_ids([9, 9, 9, 9])}}
    await thief.database["DispatchedSamplingTask"].update_one({"_id": f"{ready.id}/1"}, other)
    problems = await verifier(store)(await store.training.fetch([ready.id]))
    assert "differ from the 48 of its model calls" in problems[ready.task]


async def _score_without_a_slot(thief: Store, store: Store) -> None:
    key = task_key("train", 0, "new")
    await run.add_task(thief, key, -1)
    for value in (0.0, 1.0):
        await run.score(thief, await run.claim(thief), value)
    document = await thief.database["Record"].find_one({"_id": FIRST}) or {}
    await thief.database["Record"].insert_one(
        {**document, "_id": f"{key}/0/9", "task": key, "attempt": 9, "score": 9.0}
    )
    with pytest.raises(StoreError, match="its slot is not scored by it"):
        await store.groups.to_decide(key)


async def _forge_training_data(thief: Store, store: Store) -> None:
    document = await thief.database["DBRecordData"].find_one({"_id": FIRST}) or {}
    forged = {**document, "_id": "x/0/1", "record": "x/0/1", "advantage": 9.0}
    await thief.database["DBRecordData"].insert_one(forged)
    (problem,) = (await verifier(store)(await store.training.fetch(["x/0/1"]))).values()
    assert "give no training data x/0/1" in problem


async def _name_a_path(thief: Store, store: Store) -> None:
    await thief.database["Task"].update_many(
        {}, {"$set": {"scorer": "antigravity:fly", "agent_name": "sys:exit"}}
    )
    task = await store.tasks.get(run.READY)
    paths = await store.imports.paths()

    def score() -> None:
        allow(paths)
        with pytest.raises(ConfigError, match="may not import"):
            SCORERS.get(task.scorer)

    contextvars.copy_context().run(score)


async def _name_a_program(thief: Store, store: Store) -> None:
    meta = {"id": "subprocess:Popen", "args": '{"args": ["sh", "-c", "id"]}', "row": {"prompt": []}}
    await thief.database["Task"].update_many({}, {"$set": {"environment": "verifiers", "meta": meta}})
    task = await store.tasks.get(run.READY)
    assert task is not None

    def begin() -> None:
        allow(["verifiers"])
        with pytest.raises(TaskEnvironmentError, match="subprocess:Popen"):
            open_environment(task, call_timeout=1.0)

    contextvars.copy_context().run(begin)


async def _name_a_rule(thief: Store, store: Store) -> None:
    await thief.database["Record"].update_many({}, {"$set": {"train_rule": "antigravity:fly"}})
    record = (await store.records.by_task(run.READY))[0]

    def choose() -> None:
        allow([])
        with pytest.raises(ConfigError, match="may not import"):
            require_rule(record.train_rule or "")

    contextvars.copy_context().run(choose)


async def _come_from_the_future(thief: Store, store: Store) -> None:
    await thief.database["Evaluation"].insert_one(evaluation("running", seen_at=FAR))
    assert await store.evaluations.needed_versions() == set()
    await thief.database["Outage"].insert_one(
        {"_id": "x", "dependency": "the database", "by": "me", "why": "", "began_at": FAR, "seen_at": FAR,
         "ended_at": None}
    )  # fmt: skip
    assert await store.outages.ongoing() == []
    await thief.samplers.beat("me", host="node1", pid=7, is_draining=False)
    await thief.database["SamplerProcess"].update_one({"_id": "me"}, {"$set": {"heartbeat": FAR}})
    assert [sampler.state for sampler in await store.samplers.all()] == ["dead"]


REFUSED_BY_READERS: dict[str, Trick] = {
    "a score changed after its group was finalized": _change_a_score,
    "a model call changed after its group was finalized": _change_a_call,
    "a score of a Record that does not hold its slot": _score_without_a_slot,
    "training data that follow from no trajectory": _forge_training_data,
    "a scorer or an agent that a task names by a path": _name_a_path,
    "an environment's code, server or files that a task's `meta` names": _name_a_program,
    "a rule for what is trained that a conversation names by a path": _name_a_rule,
    "an evaluation, an outage or a sampler that was seen in the future": _come_from_the_future,
}


async def _read_everything(thief: Store, store: Store) -> None:
    names = await store.database.list_collection_names()
    for name in {*names} - {"system.views"}:
        await thief.database[name].find_one({})


async def _invent_a_trajectory(thief: Store, store: Store) -> None:
    await run.add_task(thief, task_key("train", 0, "invented"), -1)
    claim = await run.claim(thief)
    await run.score(thief, claim, 1.0)
    record = await store.records.get(claim.record_id)
    assert record.score == 1.0


async def _hold_the_run_up(thief: Store, store: Store) -> None:
    await run.add_task(thief, task_key("train", 0, "more"), -1)
    await thief.attempts.release(await run.claim(thief))
    await run.fail(thief, await run.claim(thief), max_attempts=1)
    changed = await thief.database["Task"].update_many({}, {"$set": {"query": "?"}})
    assert changed.modified_count > 0


async def _choose_the_rules(thief: Store, store: Store) -> None:
    key = task_key("train", 0, "ruled")
    await run.add_task(thief, key, -1)
    for value in (0.0, 1.0):
        await run.score(thief, await run.claim(thief), value)
    rules = GroupRules(config=GroupConfig(adv_scaling=50.0), seed=0)
    assert await finalize_group(thief, key, rules)
    ready = [item for item in await ready_data(store, "train") if item.task == key]
    data = await store.training.fetch([item.id for item in ready])
    assert max(item.advantage for item in data) == 50.0
    assert await verifier(store)(data) == {}


async def _change_an_evaluation(thief: Store, store: Store) -> None:
    await thief.database["Evaluation"].insert_one(evaluation("finished", seen_at=FAR))
    assert (await thief.database["Evaluation"].update_one({}, {"$set": {"results": {}}})).modified_count


async def _begin_settings(thief: Store, store: Store) -> None:
    values = {"output_dir": "/home/user"}
    await thief.database["Settings"].insert_one(
        {"_id": "flags/train", "values": values, "by": "me", "at": FAR}
    )


async def _drain_another(thief: Store, store: Store) -> None:
    await store.samplers.beat("other", host="node1", pid=7, is_draining=False)
    assert await thief.samplers.ask_to_drain("other", "me")
    assert await store.samplers.beat("other", host="node1", pid=7, is_draining=False) == "me"


async def _open_a_url(thief: Store, store: Store) -> None:
    await thief.gateways.open_session(
        GatewaySession(
            id="a" * 64, record=FIRST, task=run.READY, traj_id=0, attempt=1, owner="me", models=("policy",),
            max_calls=9, reward_key_digest="b" * 64,
        )
    )  # fmt: skip


ALLOWED: dict[str, Trick] = {
    "read the whole run, with queries and answers": _read_everything,
    "invent a trajectory of a slot that it claims, with model calls and a score": _invent_a_trajectory,
    "take, release and fail slots, and add and change tasks": _hold_the_run_up,
    "choose the rules by which a group that it finalizes is decided (`Task.group.rules`)": _choose_the_rules,
    "change the results of an evaluation": _change_an_evaluation,
    "begin the settings of a run, also `flags/train`, before its trainer": _begin_settings,
    "ask other samplers to drain, which ends them": _drain_another,
    "open a base URL for a running trajectory, and give its reward, as it may write the trajectory itself": (
        _open_a_url
    ),
}


async def test_a_sampler_may_write_what_its_trajectories_need(thief: Store, store: Store) -> None:
    await run.add_task(thief, task_key("train", 0, "long"), -1, generations=1)
    claim = await run.claim(thief)
    calls = [run.call(claim, index, 1, 2 + 6 * index) for index in range(2)]
    await thief.model_calls.add(claim, *calls)
    again = dataclasses.replace(calls[1], revision=1, tool_executions=calls[0].tool_executions)
    await thief.model_calls.add(claim, again, new_executions=[1])
    await thief.attempts.release(claim)
    claim = await run.claim(thief)
    assert await thief.model_calls.drop(claim, 1) == 1
    record = await store.records.get(claim.record_id)
    assert (record.traj, record.tool_calls) == ((calls[0].id,), 1)


@pytest.mark.parametrize("line", [*REFUSED_BY_READERS, *ALLOWED])
async def test_who_reads_it_refuses_it_or_every_sampler_may(thief: Store, store: Store, line: str) -> None:
    await {**REFUSED_BY_READERS, **ALLOWED}[line](thief, store)
