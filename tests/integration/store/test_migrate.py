"""Schema versions on a real server: refused, migrated, and never taken for another's."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import pytest
import small_run as run
from db_command import agentrl_db, violations

from agentrl.config.schema import RunConfig
from agentrl.documents.status import CallStatus, RecordStatus
from agentrl.errors import StoreError
from agentrl.store.admin import migrate
from agentrl.store.admin.migrate import MIGRATIONS, Migrations
from agentrl.store.client import Store, open_existing, open_store
from agentrl.store.names import SCHEMA_VERSION

pytestmark = pytest.mark.integration

RELEASED = f"{run.RUNNING}/1/1"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
OLD_VALIDATOR = {
    "$jsonSchema": {"required": ["status"], "properties": {"status": {"enum": ["failed", "created"]}}}
}


async def make_old(store: Store) -> None:
    """What version 1 left: no version, validators without ``released``, and a Record failed by that name."""
    await store.database["Run"].delete_many({})
    failure = {"kind": "released", "message": "handed back by s"}
    await store.database["Record"].update_one(
        {"_id": RELEASED}, {"$set": {"status": "failed", "failure": failure}}
    )
    await store.database.command("collMod", "Record", validator=OLD_VALIDATOR)


def test_migrations_lead_from_the_first_version_to_this_one() -> None:
    assert [migration.origin for migration in MIGRATIONS] == list(range(1, SCHEMA_VERSION))
    assert [migration.target for migration in MIGRATIONS] == list(range(2, SCHEMA_VERSION + 1))


async def test_an_old_run_is_refused_until_it_is_migrated(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.build(store, tmp_path / "weights")
    assert (await store.database["Record"].find_one({"_id": RELEASED}) or {})["status"] == "released"
    await make_old(store)
    for opening in (open_store, open_existing):
        with pytest.raises(
            StoreError, match=f"schema version 1, and this AgentRL needs {SCHEMA_VERSION}"
        ) as raised:
            await opening(run_config)
        assert f"agentrl db migrate --run_name {run_config.run_name}" in str(raised.value)
    with pytest.raises(StoreError, match="samplers hold 1 leases"):
        await agentrl_db(run_config, "migrate")
    await store.database["Task"].update_one(
        {"_id": run.RUNNING}, {"$set": {"slots.0.lease_expires_at": LONG_AGO}}
    )
    await store.claims.reap("train")
    assert await agentrl_db(run_config, "migrate", "--dry_run") == 0
    assert "due: 1 → 2: Records that were handed back are released" in capsys.readouterr().out
    assert await agentrl_db(run_config, "migrate") == 0
    assert "released, not failed: 1 documents" in capsys.readouterr().out
    record = await store.records.get(RELEASED)
    assert record is not None
    assert (record.status, record.failure) == (RecordStatus.RELEASED, None)
    assert await agentrl_db(run_config, "migrate") == 0
    assert capsys.readouterr().out == f"{run_config.run_name} has schema version {SCHEMA_VERSION}\n"
    validator = (await store.database["Record"].options())["validator"]
    assert validator != OLD_VALIDATOR
    async with await open_store(run_config) as opened:
        assert await violations(opened) == []


async def test_the_gate_and_the_lease_leave_the_run_document(store: Store, run_config: RunConfig) -> None:
    attempt = await store.trainer_lease.acquire("t", "h", 1, 60)
    database = store.database
    gate = await database["Admission"].find_one({"_id": "admission"})
    lease = await database["TrainerLease"].find_one({"_id": "trainer"})
    for name in ("Run", "Admission", "TrainerLease"):
        await database[name].drop()
    await run.add_task(store, run.READY, 0)
    await database["Task"].update_one({"_id": run.READY}, {"$set": {"scorer": "mine.scorers:close"}})
    old = [{"_id": "schema", "version": 2}, gate, lease]
    await database["Run"].insert_many([document for document in old if document is not None])
    with pytest.raises(StoreError, match=f"trainer t holds run '{run_config.run_name}'"):
        await agentrl_db(run_config, "migrate")
    await database["Run"].update_one({"_id": "trainer"}, {"$set": {"lease_expires_at": LONG_AGO}})
    assert await agentrl_db(run_config, "migrate") == 0
    assert [document["_id"] async for document in database["Run"].find()] == ["schema"]
    assert await database["Admission"].find_one({"_id": "admission"}) == gate
    assert await store.imports.paths() == {"mine.scorers:close"}
    async with await open_store(run_config) as opened:
        assert (await opened.trainer_lease.read()).attempt == attempt
        assert await opened.trainer_lease.acquire("u", "h", 1, 60) == attempt + 1


async def test_spans_get_the_temperature_of_their_call(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "_PAGE", 1)
    await run.build(store, tmp_path / "weights", unfinished=False)
    database, (first, second) = store.database, (f"{run.READY}/{traj}/1" for traj in (0, 1))
    params = {"temperature": 0.5, "top_p": 1.0}
    await database["DispatchedSamplingTask"].update_one(
        {"_id": f"{first}/1"}, {"$set": {"sampling_params": params}}
    )
    done = {"$set": {"spans.0.temperature": 0.75, "spans.1.temperature": 0.25}}
    await database["DBRecordData"].update_one({"_id": second}, done)
    absent = {"$unset": {"spans.$[].temperature": ""}}
    await database["DBRecordData"].update_many(
        {"_id": {"$ne": second}}, absent, bypass_document_validation=True
    )
    await database["Run"].update_one({"_id": "schema"}, {"$set": {"version": 3}})
    assert await agentrl_db(run_config, "migrate") == 0
    async with await open_store(run_config) as opened:
        data = {item.id: item for item in await opened.training.fetch([first, second])}
        assert [span.temperature for span in data[first].spans] == [1.0, 0.5]
        assert [span.temperature for span in data[second].spans] == [0.75, 0.25]
        others = await opened.training.fetch([f"{run.TRAINED}/0/2", f"{run.TRAINED}/1/1"])
        assert {span.temperature for item in others for span in item.spans} == {1.0}


async def test_training_data_name_their_faulty_calls(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    await run.build(store, tmp_path / "weights", unfinished=False)
    database, (first, second) = store.database, (f"{run.READY}/{traj}/1" for traj in (0, 1))
    await database["DispatchedSamplingTask"].update_one(
        {"_id": f"{first}/1"}, {"$set": {"status": CallStatus.FORMAT_ERROR.value}}
    )
    await database["Run"].update_one({"_id": "schema"}, {"$set": {"version": 8}})
    assert await agentrl_db(run_config, "migrate") == 0
    async with await open_store(run_config) as opened:
        data = {item.id: item.faulty_calls for item in await opened.training.fetch([first, second])}
        assert data == {first: (1,), second: ()}


async def test_a_newer_run_is_refused(store: Store, run_config: RunConfig) -> None:
    await store.database["Run"].update_one({"_id": "schema"}, {"$set": {"version": 99}})
    for opening in (open_store, open_existing):
        with pytest.raises(
            StoreError, match=f"has schema version 99, and this AgentRL knows {SCHEMA_VERSION}"
        ):
            await opening(run_config)
    with pytest.raises(StoreError, match="use the newer AgentRL"):
        await Migrations(store.connection).run()


async def test_a_new_run_has_this_version_however_many_make_it(run_config: RunConfig) -> None:
    stores = await asyncio.gather(*(open_store(run_config) for _ in range(8)))
    schema = await stores[0].database["Run"].find_one({"_id": "schema"})
    assert schema == {"_id": "schema", "version": SCHEMA_VERSION}
    await stores[0].database.client.drop_database(run_config.run_name)
    for store in stores:
        await store.close()


async def test_a_mistyped_run_is_an_error_that_lists_the_runs(store: Store, run_config: RunConfig) -> None:
    wrong = dataclasses.replace(run_config, run_name=f"{run_config.run_name}x")
    for words in (("check",), ("prune", "--older_than_days", "1"), ("reopen",), ("rescore",), ("migrate",)):
        with pytest.raises(StoreError, match=f"there is no run '{wrong.run_name}'") as raised:
            await agentrl_db(wrong, *words)
        assert f"did you mean {run_config.run_name}? runs: " in str(raised.value)
    assert wrong.run_name not in await store.database.client.list_database_names()
