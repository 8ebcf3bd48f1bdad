"""``agentrl runs`` on a real server: list, tag, note and delete runs."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from db_command import agentrl_db
from pymongo import MongoClient
from test_store_claims import make_tasks

from agentrl.base.processes import ProcessIdentity, owned_name
from agentrl.config.schema import RunConfig
from agentrl.documents.run import InferenceService, PolicyVersion
from agentrl.errors import ConfigError, RunMissingError, StoreError
from agentrl.lab import manage_runs as admin_runs
from agentrl.screens import screens_cli
from agentrl.store.client import Store, open_existing, open_store, run_exists
from agentrl.store.mechanics.connection import SETTLE_SECONDS
from agentrl.store.run_list import Runs

pytestmark = pytest.mark.integration


async def agentrl_runs(run: RunConfig, *words: str, changes: tuple[str, ...] = ()) -> int:
    """Run ``agentrl runs WORDS`` inside the running event loop; the server is named before the subcommand."""
    where = ("--db_connection_string", str(run.db_connection_string))
    arguments = screens_cli.runs_parser().parse_args([*where, *words])
    arguments.changes = list(changes)
    return int(await arguments.handler(arguments))


async def output_of(store: Store, folder: Path) -> Path:
    """Make an output folder of the run's trainer, and store the flag that names it."""
    (folder / "weights").mkdir(parents=True)
    values = {"output_dir": str(folder), "model_name_or_path": "models/tiny"}
    await store.settings.join("train", values, given=["output_dir"], packages={})
    return folder


async def test_tags_and_note_are_listed_and_go_with_an_export(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await output_of(store, tmp_path / "output")
    name = run_config.run_name
    assert await agentrl_runs(run_config, "tag", name, changes=("+slow", "+best")) == 0
    assert await agentrl_runs(run_config, "tag", name, changes=("-slow", "+v2.1")) == 0
    assert await agentrl_runs(run_config, "note", name, "twice the rate") == 0
    with pytest.raises(ConfigError, match="the tag is 'a b'"):
        await agentrl_runs(run_config, "tag", name, changes=("+a b",))
    with pytest.raises(ConfigError, match="501 characters"):
        await agentrl_runs(run_config, "note", name, "x" * 501)
    capsys.readouterr()
    assert await agentrl_runs(run_config, "--json") == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)["runs"]}[name]
    assert (listed["tags"], listed["note"]) == (["best", "v2.1"], "twice the rate")
    assert listed["model"] == "models/tiny"
    assert listed["bytes"] > 0
    assert await agentrl_runs(run_config) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if name in line)
    assert "ended" in row
    assert "best v2.1" in row
    copy = replace(run_config, run_name=f"{name}_copy")
    assert await agentrl_db(run_config, "export", str(tmp_path / "run")) == 0
    assert await agentrl_db(copy, "import", str(tmp_path / "run")) == 0
    async with await open_existing(copy) as copied:
        summaries = await Runs(copied.connection).all(30.0)
    assert {run.name: run.note for run in summaries}[copy.run_name] == "twice the rate"
    assert await agentrl_runs(copy, "rm", copy.run_name, "--yes") == 0
    assert not await run_exists(copy)


async def test_a_live_run_is_not_deleted(store: Store, run_config: RunConfig) -> None:
    name = run_config.run_name
    attempt = await store.trainer_lease.acquire("trainer-7", socket.gethostname(), os.getpid(), 60.0)
    with pytest.raises(StoreError, match=f"is live: trainer trainer-7 on {socket.gethostname()}"):
        await agentrl_runs(run_config, "rm", name, "--yes")
    await store.trainer_lease.release(attempt)
    engine = InferenceService(id="e", url="http://node3:8000", engine="vllm", model="m", host="node3", pid=1)
    await store.database["InferenceService"].insert_one(engine.to_document())
    with pytest.raises(StoreError, match="is live: engine http://node3:8000 on node3"):
        await agentrl_runs(run_config, "rm", name, "--yes")
    assert await run_exists(run_config)
    await store.database["Run"].update_one({"_id": "schema"}, {"$set": {"version": 99}})
    with pytest.raises(StoreError, match="has schema version 99"):
        await agentrl_runs(run_config, "rm", name, "--yes")


def _of_a_dead_process() -> tuple[str, ProcessIdentity]:
    """Return the name of an owner that has ended, and its process."""
    code = (
        "import os; from dataclasses import astuple; from agentrl.base.processes import identify, owned_name;"
        "print(owned_name('try'), *astuple(identify(os.getpid())))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    owner, boot, namespace, pid, started = output.split()
    return owner, ProcessIdentity(boot_id=boot, pid_namespace=namespace, pid=int(pid), started=int(started))


async def test_the_leases_of_dead_processes_keep_no_run(store: Store, run_config: RunConfig) -> None:
    """A trial that was killed holds its slot for an hour, and a killed trainer its lease."""
    owner, dead = await asyncio.to_thread(_of_a_dead_process)
    host, name = socket.gethostname(), run_config.run_name
    await store.tasks.load(make_tasks(1))
    living = await store.claims.claim(split="train", owner=owned_name("try"), lease_seconds=3600.0)
    assert living is not None
    await store.trainer_lease.acquire("trainer-7", host, dead.pid, 3600.0, dead)
    with pytest.raises(StoreError, match="is live: sampler try-") as caught:
        await agentrl_runs(run_config, "rm", name, "--yes")
    assert "trainer" not in caught.value.message
    slot = {"$set": {"slots.$.owner": owner}}
    await store.database["Task"].update_one({"slots.owner": living.owner}, slot)
    assert await agentrl_runs(run_config, "rm", name, "--yes") == 0
    assert not await run_exists(run_config)


async def test_samplers_and_engines_keep_a_run_by_their_heartbeats(
    store: Store, run_config: RunConfig
) -> None:
    """One that was killed on another machine does not, while its claims are leased; an idle one does."""
    owner, dead = await asyncio.to_thread(_of_a_dead_process)
    name, samplers = run_config.run_name, store.database["SamplerProcess"]
    await store.tasks.load(make_tasks(2))
    for holder in ("node9-7-0a1b2c", "node9-7-0a1b2c-scoring", f"{owner}-scoring"):
        assert await store.claims.claim(split="train", owner=holder, lease_seconds=3600.0) is not None
    for sampler in ("node9-7-0a1b2c", owner):
        await store.samplers.beat(sampler, host="node9", pid=7, is_draining=False)
    engine = InferenceService(id="e", url="u", engine="vllm", model="m", host="h", pid=1, process=dead)
    await store.services.register(engine)
    assert await Runs(store.connection).holders(name, 30.0) == ["sampler node9-7-0a1b2c"]
    await samplers.update_many({}, [{"$set": {"heartbeat": {"$subtract": ["$$NOW", 60_000]}}}])
    assert await Runs(store.connection).holders(name, 30.0) == []
    await store.samplers.beat("node8-9-0a1b2c", host="node8", pid=9, is_draining=False)
    with pytest.raises(StoreError, match="is live: sampler node8-9-0a1b2c"):
        await agentrl_runs(run_config, "rm", name, "--yes")
    await store.samplers.end("node8-9-0a1b2c")
    assert await agentrl_runs(run_config, "rm", name, "--yes") == 0


async def test_rm_asks_and_deletes_the_database_and_the_folder(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    name, folder = run_config.run_name, await output_of(store, tmp_path / "output")
    words = ("rm", name, "--folders")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigError, match="nobody can be asked whether to delete database"):
        await agentrl_runs(run_config, *words)
    for answer in ("\n", "y\n"):
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        assert folder.is_dir()
        assert await agentrl_runs(run_config, *words) == 0
        assert f"and folder {folder}? [y/N]" in capsys.readouterr().out
    assert not folder.exists()
    assert not await run_exists(run_config)
    with pytest.raises(RunMissingError):
        await agentrl_runs(run_config, *words)


@pytest.mark.attack
async def test_a_deletion_that_stood_still_leaves_a_new_run_of_the_name(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await output_of(store, tmp_path / "output")
    server = MongoClient[Any](str(run_config.db_connection_string))

    def overtaken(folder: Path) -> None:
        """Another call finishes the deletion, and a new run begins."""
        server.drop_database(run_config.run_name)
        server[run_config.run_name]["Run"].insert_one({"_id": "schema", "version": 1})

    monkeypatch.setattr(admin_runs, "delete_folder", overtaken)
    with pytest.raises(RunMissingError, match="deleted by another call"):
        await agentrl_runs(run_config, "rm", run_config.run_name, "--folders", "--yes")
    assert server[run_config.run_name]["Run"].count_documents({}) == 1
    server.close()


async def test_rm_refuses_folders_that_are_not_the_runs_alone(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = run_config.run_name, await output_of(store, tmp_path / "output")
    words = ("rm", name, "--folders", "--yes")
    monkeypatch.chdir(folder / "weights")
    with pytest.raises(ConfigError, match="holds more than a run's output"):
        await agentrl_runs(run_config, *words)
    monkeypatch.chdir(tmp_path)
    other = replace(run_config, run_name=f"{name}_other")
    async with await open_store(other) as second:
        await second.settings.join("train", {"output_dir": str(folder)}, given=[], packages={})
    with pytest.raises(ConfigError, match=f"is the output of run '{other.run_name}' too"):
        await agentrl_runs(run_config, *words)
    assert await agentrl_runs(other, "rm", other.run_name, "--yes") == 0
    version = PolicyVersion(id=1, step=1, location=str(tmp_path / "b/1"), files=(), train_step="s")
    await store.database["PolicyVersion"].insert_one(version.to_document())
    with pytest.raises(ConfigError, match="does not hold the newest weights"):
        await agentrl_runs(run_config, *words)
    folder.joinpath("weights").rmdir()
    with pytest.raises(ConfigError, match="has neither weights nor checkpoints"):
        await agentrl_runs(run_config, *words)
    assert folder.is_dir()
    assert await run_exists(run_config)


def test_words_with_a_sign_are_tags_only_behind_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []

    async def keep(arguments: object) -> int:
        seen.append((getattr(arguments, "text", ""), getattr(arguments, "changes", [])))
        return 0

    monkeypatch.setattr(screens_cli, "tag_run", keep)
    monkeypatch.setattr(screens_cli, "note_run", keep)
    assert screens_cli.runs(["--mongo_dir", "there", "tag", "math", "+best", "-old"]) == 0
    assert screens_cli.runs(["note", "tag", "+5 percent"]) == 0
    assert seen == [("", ["+best", "-old"]), ("+5 percent", [])]


@pytest.mark.attack
@pytest.mark.parametrize("value", [5, "x", [1, {"a": 2}], {"$where": "1"}, None, math.nan, "A" * 10_000])
async def test_one_run_with_damaged_documents_does_not_hide_the_others(
    store: Store, run_config: RunConfig, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """An import keeps documents that the validators refuse."""
    evil = store.connection.client[f"{store.run_name}_evil"]
    try:
        await evil["Run"].insert_one({"_id": "schema", "version": 1})
        await evil["Run"].insert_one({"_id": "remarks", "tags": value, "note": value})
        await evil["Run"].insert_one({"_id": "parent", "run": value, "kind": value, "step": value})
        await evil["Task"].insert_one({"_id": "t", "split": value, "status": "running", "slots": value})
        step = {"step": value, "status": "committed", "committed_at": value, "metrics": value}
        await evil["TrainStep"].insert_one({"_id": "s", **step})
        await evil["Record"].insert_one({"_id": "r", "created_at": value})
        await evil["TrainerLease"].insert_one({"_id": "trainer", "expires_at": value, "ended": value})
        for words in ((), ("--json",)):
            assert await agentrl_runs(run_config, *words) == 0
            shown = capsys.readouterr().out
            assert evil.name[:40] in shown
            assert run_config.run_name in shown
    finally:
        await store.connection.client.drop_database(evil.name)


async def test_a_process_that_works_on_a_run_ends_when_it_is_deleted(
    store: Store, run_config: RunConfig
) -> None:
    name = run_config.run_name
    assert await agentrl_runs(run_config, "rm", name, "--yes") == 0
    with pytest.raises(RunMissingError, match="renamed or deleted"):
        await store.settings.begin("tasks", {"num_generations": 2}, "sampler")
    with pytest.raises(RunMissingError, match="renamed or deleted"):
        await store.connection.transaction(
            lambda: store.connection.collection("Task").insert_one({"_id": "t"})
        )
    assert await store.database.list_collection_names() == []
    async with await open_store(run_config) as other:  # another run of that name
        await other.tasks.load(make_tasks(1))
        await asyncio.sleep(SETTLE_SECONDS)
        with pytest.raises(RunMissingError, match="renamed or deleted"):
            await store.settings.begin("tasks", {"num_generations": 2}, "sampler")
        assert await other.settings.all() == {}
