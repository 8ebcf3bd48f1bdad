"""``agentrl db users`` on a server with authentication: each user can do its work, and nothing else."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
import small_run as run
from db_command import agentrl_db, violations
from pymongo import MongoClient
from ready_data import ready_data

from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.documents.task import task_key
from agentrl.documents.training import TokenStatistics, TrainStep
from agentrl.errors import StoreError
from agentrl.lab.transfer import Transfer
from agentrl.local.mongod import choose_mongod, stop_daemon
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.screens.snapshot import SnapshotReader
from agentrl.store.client import Store, open_existing, open_store
from agentrl.store.mechanics import blobs
from agentrl.store.steps import StaleVersions

pytestmark = pytest.mark.integration

ADMIN_PASSWORD = secrets.token_hex(12)
SAMPLER_PASSWORD = "from the/environment@%"
COMPOSE = Path(__file__).parents[4] / "deploy/compose"
KINDS = ("sampler", "trainer", "engine", "auditor", "annotator")
MORE = task_key("train", 0, "more")


@pytest.fixture(scope="module")
def guarded_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A replica set of one that demands passwords, with an administrator."""
    folder = tmp_path_factory.mktemp("auth")
    dbpath, key, pid_file = folder / "data", folder / "key", folder / "pid"
    dbpath.mkdir()
    key.write_text(secrets.token_hex(64))
    key.chmod(0o400)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(choose_mongod().mongod.path), "--fork", "--dbpath", str(dbpath), "--logpath", str(folder / "log"),
        "--pidfilepath", str(pid_file), "--replSet", "guarded", "--bind_ip", "127.0.0.1", "--port", str(port),
        "--nounixsocket", "--auth", "--keyFile", str(key), "--wiredTigerCacheSizeGB", "0.25",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    try:
        with MongoClient[dict[str, object]](f"127.0.0.1:{port}", directConnection=True) as client:
            member = {"_id": 0, "host": f"127.0.0.1:{port}"}
            client.admin.command("replSetInitiate", {"_id": "guarded", "members": [member]})
            while not client.admin.command("hello")["isWritablePrimary"]:
                pass
            client.admin.command("createUser", "root", pwd=ADMIN_PASSWORD, roles=["root"])
        yield f"mongodb://root:{ADMIN_PASSWORD}@127.0.0.1:{port}/?replicaSet=guarded"
    finally:
        stop_daemon(int(pid_file.read_text()), dbpath)


@pytest.fixture
def guarded(run_config: RunConfig, guarded_uri: str) -> RunConfig:
    """The administrator's view of a run on that server."""
    return dataclasses.replace(run_config, db_connection_string=guarded_uri)


@pytest.fixture
async def users(
    guarded: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[dict[str, RunConfig]]:
    """A run on that server, and the view that each kind of user has of it."""
    monkeypatch.setenv("AGENTRL_SAMPLER_PASSWORD", SAMPLER_PASSWORD)
    monkeypatch.setattr(blobs, "_LIMIT", 10)
    async with await open_store(guarded) as store:
        await run.build(store, tmp_path / "weights")
        assert await agentrl_db(guarded, "users", "--create") == 0
        yield {kind: dataclasses.replace(guarded, db_connection_string=uri) for kind, uri in
               printed(capsys.readouterr().out).items()}  # fmt: skip
        assert await violations(store) == []
        await store.database.client.drop_database(guarded.run_name)


def printed(out: str) -> dict[str, str]:
    """Kind of user → its connection string, of what the command printed."""
    uris = dict(re.findall(r"^agentrl_(\w+) +made +(\S+)$", out, re.MULTILINE))
    uris["sampler"] = uris["sampler"].replace("$AGENTRL_SAMPLER_PASSWORD", quote(SAMPLER_PASSWORD, safe=""))
    return uris


async def test_a_user_opens_a_run_whose_schema_another_release_made(
    guarded: RunConfig, users: dict[str, RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    async with await open_store(guarded) as store:
        await store.database.command("collMod", "Settings", validator={})
        async with await open_store(users["sampler"]) as sampler:
            assert await run.claim(sampler) is not None
        assert "has another release's schema" in caplog.text
        assert await agentrl_db(guarded, "users", "--create") == 0
        caplog.clear()
        async with await open_store(users["sampler"]):
            assert "another release's schema" not in caplog.text


async def refused(*calls: Callable[[], Awaitable[object]]) -> None:
    """Every call is refused for want of rights."""
    for call in calls:
        with pytest.raises(Exception, match="not authorized"):
            await call()


async def test_a_sampler_samples_and_does_no_more(
    users: dict[str, RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    async with await open_store(users["sampler"]) as store:
        await run.add_task(store, MORE, 5)
        assert await store.epochs.open("train", 1, 0, 2) > 0
        claim = await run.claim(store)
        assert await store.claims.heartbeat([claim], 60) == []
        await store.attempts.release(claim)
        await run.fail(store, await run.claim(store), max_attempts=3)
        assert await store.expired_leases.reap("train") == 0
        await store.claims.reopen_failed("train")
        for _ in range(5):
            await score_slot(store)
        await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()
        await store.wait_for_change("TrainStep", timeout=0.3)
        assert "no change stream" not in caplog.text
        assert await store.services.live(10) == []
        assert await store.policy_versions.latest() is not None
        await store.settings.begin("tasks", {"num_generations": 2}, "sample")
        await store.settings.begin("tasks", {"num_generations": 2}, "sample")
        data = tuple(meta.id for meta in await ready_data(store, "train"))
        step = TrainStep(id="1/2", step=2, policy_version=1, data=data[:2], owner="s")
        database = store.database
        await refused(
            lambda: store.steps.plan(step),
            lambda: store.policy_versions.withdraw_after(0),
            lambda: store.training.mark_stale("train", StaleVersions(((0, 8),))),
            lambda: database["Record"].delete_many({}),
            lambda: database["Task"].drop(),
            lambda: database.command("collMod", "Record", validator={}),
            lambda: database["Task"].create_index("x"),
            lambda: store.settings.forget("sampling"),
            lambda: database["Settings"].update_one({"_id": "tasks"}, {"$set": {"by": "me"}}),
            lambda: database.client["other"]["Task"].insert_one({}),
            lambda: database.client["other"]["Task"].find_one({}),
            lambda: database.command("usersInfo", 1),
        )


async def score_slot(store: Store) -> None:
    await run.score(store, await run.claim(store), 1.0, version=1)


async def test_a_trainer_trains_and_does_no_more(users: dict[str, RunConfig], tmp_path: Path) -> None:
    async with await open_store(users["trainer"]) as store:
        attempt = await store.trainer_lease.acquire("t", "h", os.getpid(), 60)
        await store.trainer_lease.renew(attempt, 60)
        data = tuple(meta.id for meta in await ready_data(store, "train"))
        step = TrainStep(id=f"{attempt}/2", step=2, policy_version=1, data=data, owner="t")
        await store.training.fetch(data)
        await store.steps.plan(step, attempt=attempt)
        await store.steps.commit(step.id, {"loss": 0.1}, data, attempt=attempt, counted=[run.READY])
        await run.publish(store, tmp_path / "more", 2, step=2, train_step=step.id)
        values = TokenStatistics(
            id="x", record=data[0], train_step=step.id, step=2, spans=(), log_ratios=b"", entropies=b""
        )
        for _ in range(2):
            await store.training.put_token_statistics([values])
        await store.steps.revert_after(1, attempt=attempt)
        await store.policy_versions.withdraw_after(1)
        await store.training.mark_stale("train", StaleVersions(((0, -1),)))
        await store.trainer_lease.release(attempt)
        await store.wait_for_change("Task", "DBRecordData", timeout=0.3)
        await refused(
            lambda: run.add_task(store, MORE, 5),
            lambda: store.services.register(engine()),
            lambda: store.database["Record"].insert_one({"_id": "x"}),
            lambda: store.database["DBRecordData"].delete_many({}),
            lambda: store.database["TrainStep"].drop(),
            lambda: store.database.client.drop_database(store.run_name),
        )


def engine() -> InferenceService:
    return InferenceService(id="e", url="http://e", engine="local", model="m", host="h", pid=1)


async def test_an_engine_registers_and_does_no_more(users: dict[str, RunConfig]) -> None:
    async with await open_store(users["engine"]) as store:
        await store.services.register(engine())
        await store.services.beat("e", status=ServiceStatus.READY, policy_version=1, running_requests=0)
        assert [service.id for service in await store.services.live(10)] == ["e"]
        assert await store.policy_versions.latest() is not None
        await store.services.stop("e")
        await refused(
            lambda: store.policy_versions.withdraw_after(0),
            lambda: store.database["Task"].update_one({}, {"$set": {"status": "created"}}),
            lambda: store.database["InferenceService"].delete_many({}),
        )


async def test_an_auditor_reads_everything_and_writes_nothing(
    users: dict[str, RunConfig], tmp_path: Path
) -> None:
    async with await open_existing(users["auditor"]) as store:
        assert not (await SnapshotReader(store).read()).empty
        assert await store.database["audit_trajectories"].find_one({}) is not None
        assert await agentrl_db(users["auditor"], "check") == 0
        manifest = await Transfer(store.connection).export(tmp_path / "run")
        assert manifest.documents > 10
        names = await store.database.list_collection_names(filter={"type": "collection"})
        for name in {*names, "New"} - {"system.views"}:
            collection = store.database[name]
            await refused(
                partial(collection.insert_one, {}),
                partial(collection.update_many, {}, {"$set": {"x": 1}}),
                partial(collection.delete_many, {}),
                collection.drop,
            )
        texts = [path.read_text() for path in (tmp_path / "run").iterdir()]
        for uri in (config.db_connection_string for config in users.values()):
            password = unquote(str(uri).split(":")[2].partition("@")[0])
            assert not any(password in text for text in texts)
        assert not any(ADMIN_PASSWORD in text for text in texts)


async def test_an_annotator_labels_and_does_no_more(users: dict[str, RunConfig]) -> None:
    async with await open_existing(users["auditor"]) as store:
        assert not await store.labels.may_write()
    async with await open_existing(users["annotator"]) as store:
        assert await store.labels.may_write()
        await store.labels.put(f"{run.READY}/0/1", by="ann", label="cheats", score=0.0)
        assert await store.labels.remove(f"{run.READY}/0/1", by="ann")
        await refused(
            lambda: store.database["Record"].update_one({}, {"$set": {"score": 1.0}}),
            lambda: store.database["Task"].insert_one({}),
            lambda: store.database["Label"].drop(),
        )


async def test_users_are_listed_updated_and_made_for_all_runs(
    users: dict[str, RunConfig], guarded: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await agentrl_db(guarded, "users") == 0
    out = capsys.readouterr().out
    assert re.search(rf"agentrl_auditor@{guarded.run_name} +agentrl_auditor@{guarded.run_name}\n", out)
    assert await agentrl_db(guarded, "users", "--create") == 0
    out = capsys.readouterr().out
    assert out.count(" updated ") == len(KINDS)
    assert "$AGENTRL_TRAINER_PASSWORD@" in out
    assert await agentrl_db(guarded, "users", "--create", "--all_runs") == 0
    uris = printed(capsys.readouterr().out)
    new = dataclasses.replace(
        guarded, run_name=f"{guarded.run_name}_new", db_connection_string=uris["sampler"]
    )
    async with await open_store(new) as store:
        await run.add_task(store, MORE, 0)
        await score_slot(store)
    async with await open_existing(dataclasses.replace(new, db_connection_string=uris["auditor"])) as store:
        assert await store.tasks.splits() == ["train"]
        await refused(lambda: store.database["Task"].delete_many({}))
    async with await open_existing(guarded) as store:
        await store.database.client.drop_database(new.run_name)


def run_compose_scripts(folder: Path, server: str, run_name: str) -> str:
    """Make the secrets and the users on ``server``; return what was printed."""
    made = [sys.executable, str(COMPOSE / "make_secrets.py"), str(folder), run_name]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    (folder / "admin/uri").chmod(0o600)
    (folder / "admin/uri").write_text(server)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(COMPOSE / "make_users.sh"), str(folder / "admin"), run_name],
        env={**os.environ, "PATH": path, "MONGO_URI_FILE": str(folder / "admin/uri")},
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


async def test_the_scripts_of_compose_make_a_new_run_and_its_users(
    guarded: RunConfig, tmp_path: Path
) -> None:
    server, name = str(guarded.db_connection_string), guarded.run_name
    said = run_compose_scripts(tmp_path, server, name)
    assert said.count(" made ") == len(KINDS)
    host, options = re.findall(r"@([^/]+)/\?(.*)$", server)[0]
    for kind in KINDS:
        user, password = re.findall(r"//([^:]+):([^@]+)@", (tmp_path / f"{kind}/uri").read_text())[0]
        assert password not in said
        uri = f"mongodb://{user}:{password}@{host}/?authSource={name}&{options}"
        async with await open_existing(dataclasses.replace(guarded, db_connection_string=uri)) as store:
            await refused(partial(store.database["Task"].delete_many, {}))
    async with await open_existing(guarded) as store:
        await store.database.client.drop_database(name)


async def test_a_wrong_password_and_a_server_without_rights_are_told(
    users: dict[str, RunConfig], guarded: RunConfig
) -> None:
    wrong = str(guarded.db_connection_string).replace(ADMIN_PASSWORD, "not-the-password")
    with pytest.raises(StoreError, match="refused the user") as raised:
        await open_existing(dataclasses.replace(guarded, db_connection_string=wrong))
    assert "not-the-password" not in str(raised.value)
    with pytest.raises(StoreError, match="does not let this user manage users"):
        await agentrl_db(users["trainer"], "users", "--create", "--all_runs")
