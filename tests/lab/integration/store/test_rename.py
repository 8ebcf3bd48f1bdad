"""``agentrl runs rename`` on a real server: all of a run moves, and a kill leaves no two halves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loaded_tasks import load_tasks
from test_run_admin import agentrl_runs

from agentrl.base.folder_owner import OWNER_FILE
from agentrl.config.schema import RunConfig, TaskConfig
from agentrl.documents.document import now
from agentrl.documents.run import PolicyVersion, RunSettings
from agentrl.errors import ConfigError, LeaseLostError, RunMissingError, StoreError
from agentrl.lab.manage_runs import Rename
from agentrl.store.client import Store, open_connection, open_existing, run_exists
from agentrl.store.run_list import Runs

pytestmark = pytest.mark.integration

_KILLED = """
import asyncio, os, signal, sys
from agentrl.screens.screens_cli import runs
from agentrl.lab import manage_runs

place, words = sys.argv[1], sys.argv[2:]
owner, name = {"copy": (manage_runs.Transfer, "copy"), "paths": (manage_runs.Rename, "_rewrite_paths"),
               "move": (manage_runs, "_move"), "drop": (manage_runs.Rename, "_copy")}[place]
work = getattr(owner, name)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

async def after(*arguments, **named):
    await work(*arguments, **named)
    kill()

def after_moving(*arguments):
    work(*arguments)
    kill()

setattr(owner, name, after_moving if place == "move" else after)
raise SystemExit(runs(words))
"""


@pytest.fixture
async def new(run_config: RunConfig) -> Any:
    """Return the configuration under the new name; its database is dropped at the end."""
    config = replace(run_config, run_name=f"{run_config.run_name}_new")
    yield config
    connection = await open_connection(config)
    await connection.client.drop_database(config.run_name)
    await connection.close()


async def filled(store: Store, run: RunConfig, folder: Path) -> Path:
    """Give the run tasks, settings, published weights and a checkpoint in an output folder; return it."""
    output = folder / store.run_name
    weights = output / "weights" / "v000001"
    weights.mkdir(parents=True)
    checkpoint = output / "checkpoint-000001"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text(json.dumps({"run_name": store.run_name, "step": 1}))
    values = {"output_dir": str(output), "run_name": store.run_name}
    await store.settings.join("train", values, given=["output_dir"], packages={})
    tasks = folder / "tasks.jsonl"
    tasks.write_text(
        "".join(json.dumps({"id": f"t{n}", "query": "2+2?", "answer": "4"}) + "\n" for n in range(3))
    )
    await load_tasks(store, run, TaskConfig(), str(tasks), split="train", num_generations=2)
    version = PolicyVersion(id=1, step=1, location=str(weights.resolve()), files=(), train_step="1/1")
    await store.database["PolicyVersion"].insert_one(version.to_document())
    return output


async def contents(run: RunConfig) -> dict[str, int]:
    """Return the number of documents of each collection."""
    async with await open_existing(run) as store:
        listed = await store.database.list_collection_names(filter={"type": "collection"})
        return {
            name: await store.database[name].count_documents({})
            for name in sorted(listed)
            if not name.startswith("system.")
        }


async def renamed_whole(old: RunConfig, new: RunConfig, output: Path, before: dict[str, int]) -> None:
    """Assert that the run is whole under the new name, and nothing is left under the old one."""
    folder = output.with_name(new.run_name)
    assert await contents(new) == before
    async with await open_existing(new) as store:
        assert old.run_name not in await store.connection.client.list_database_names()
        flags = (await store.settings.resolved())["train"].values
        assert flags == {"output_dir": str(folder), "run_name": new.run_name}
        version = await store.database["PolicyVersion"].find_one({"_id": 1})
        assert version["location"] == str(folder / "weights" / "v000001")
        schema = await store.database["Run"].find_one({"_id": "schema"})
        assert schema is not None
        assert sorted(schema) == ["_id", "made_at", "version"]
        views = await store.database.list_collection_names(filter={"type": "view"})
        assert "audit_trajectories" in views
    state = json.loads((folder / "checkpoint-000001" / "state.json").read_text())
    assert state == {"run_name": new.run_name, "step": 1}
    assert not await asyncio.to_thread(output.exists)


async def test_rename_moves_database_folder_and_settings(
    store: Store, run_config: RunConfig, new: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, before = await filled(store, run_config, tmp_path), await contents(run_config)
    assert await agentrl_runs(run_config, "rename", run_config.run_name, new.run_name) == 0
    folder = output.with_name(new.run_name)
    assert f"{run_config.run_name} → {new.run_name}, folder {folder}" in capsys.readouterr().out
    await renamed_whole(run_config, new, output, before)
    with pytest.raises(RunMissingError, match="there is no run"):
        await agentrl_runs(run_config, "rename", run_config.run_name, f"{new.run_name}2")


async def test_the_folders_of_earlier_starts_move_too_if_they_are_the_runs(
    store: Store, run_config: RunConfig, new: RunConfig, tmp_path: Path
) -> None:
    owner = await store.settings.owner()
    folders = {name: tmp_path / name / store.run_name for name in ("first", "foreign", "last")}
    for attempt, (name, folder) in enumerate(folders.items(), 1):
        (folder / "checkpoint-000001").mkdir(parents=True)
        (folder / "checkpoint-000001" / "state.json").write_text(
            json.dumps({"run_name": store.run_name, "step": 1})
        )
        of = replace(owner, id="0" * 32) if name == "foreign" else owner
        (folder / OWNER_FILE).write_bytes(of.to_json())
        values = {"output_dir": str(folder), "run_name": store.run_name}
        await store.settings.start(
            RunSettings(id="flags/train", values=values, by="train", at=now()), attempt
        )
    assert await agentrl_runs(run_config, "rename", run_config.run_name, new.run_name) == 0
    async with await open_existing(new) as renamed:
        found = set(await renamed.settings.checkpoint_folders())
        with_others = set(await renamed.settings.checkpoint_folders(taken=True))
    moved = {folders[name].with_name(new.run_name) for name in ("first", "last")}
    assert found == moved
    assert with_others == {*moved, folders["foreign"]}
    for folder in with_others:
        state = json.loads((folder / "checkpoint-000001" / "state.json").read_text())
        assert (state["run_name"] == new.run_name) == (folder in moved)


@pytest.mark.parametrize("place", ["copy", "paths", "move", "drop"])
async def test_a_killed_renaming_leaves_one_run_that_the_same_command_finishes(
    store: Store, run_config: RunConfig, new: RunConfig, tmp_path: Path, warm_python: Path, place: str
) -> None:
    output, before = await filled(store, run_config, tmp_path), await contents(run_config)
    words = ["--db_connection_string", str(run_config.db_connection_string), "rename", run_config.run_name]
    program = tmp_path / "killed.py"
    program.write_text(_KILLED, encoding="utf-8")
    killed = await asyncio.create_subprocess_exec(
        warm_python, program, place, *words, new.run_name, cwd=tmp_path
    )
    assert await asyncio.wait_for(killed.wait(), 120) == -signal.SIGKILL
    for run in (run_config, new):
        if run is new and place == "drop":
            assert await run_exists(new)
            continue
        with pytest.raises(StoreError, match="did not finish"):
            await run_exists(run)
    runs = await Runs(store.connection).all(30.0)
    problems = {run.name: run.problem for run in runs if run.name.startswith(run_config.run_name)}
    assert list(problems.values()).count(None) == (1 if place == "drop" else 0)
    with pytest.raises(StoreError, match="did not finish"):
        await agentrl_runs(run_config, "rename", run_config.run_name, f"{new.run_name}2")
    assert await agentrl_runs(run_config, "rename", run_config.run_name, new.run_name) == 0
    await renamed_whole(run_config, new, output, before)


@pytest.mark.attack
@pytest.mark.parametrize("place", ["_rewrite_paths", "_copy"])
async def test_a_renaming_that_stood_still_takes_nothing_from_the_one_that_finished(
    store: Store, run_config: RunConfig, new: RunConfig, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, place: str,
) -> None:  # fmt: skip
    output, before = await filled(store, run_config, tmp_path), await contents(run_config)
    work, words = getattr(Rename, place), ("rename", run_config.run_name, new.run_name)

    async def overtaken(*given: Any) -> None:
        """A second call is refused, and finishes once the lease of the first has expired."""
        await work(*given)
        monkeypatch.setattr(Rename, place, work)
        if place == "_rewrite_paths":
            with pytest.raises(StoreError, match=f"another process makes run '{new.run_name}'"):
                await agentrl_runs(run_config, *words)
            lease = {"maker.process": None, "maker.lease_expires_at": now()}
            schema = store.connection.client[new.run_name]["Run"]
            await schema.update_one({"_id": "schema"}, {"$set": lease})
        await agentrl_runs(run_config, *words)

    monkeypatch.setattr(Rename, place, overtaken)
    if place == "_rewrite_paths":
        with pytest.raises(LeaseLostError, match="another process makes run"):
            await agentrl_runs(run_config, *words)
    else:
        assert await agentrl_runs(run_config, *words) == 0
    await renamed_whole(run_config, new, output, before)


async def test_what_cannot_be_renamed_keeps_its_name(
    store: Store, run_config: RunConfig, new: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, words = await filled(store, run_config, tmp_path), ("rename", run_config.run_name)
    attempt = await store.trainer_lease.acquire("trainer-7", socket.gethostname(), os.getpid(), 60.0)
    with monkeypatch.context() as patched:
        patched.delattr(Rename, "_copy")  # its mark would end the trainer
        with pytest.raises(StoreError, match="is live: trainer trainer-7"):
            await agentrl_runs(run_config, *words, new.run_name)
    await store.trainer_lease.release(attempt)
    with pytest.raises(StoreError, match=f"has a database '{run_config.run_name}' already"):
        await agentrl_runs(run_config, *words, run_config.run_name)
    with pytest.raises(ConfigError, match="--run_name is 'a b'"):
        await agentrl_runs(run_config, *words, "a b")
    output.with_name(new.run_name).mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        await agentrl_runs(run_config, *words, new.run_name)
    output.with_name(new.run_name).rmdir()
    (output / "checkpoint-000001" / "state.json").write_text("{")
    with pytest.raises(StoreError, match="a folder of the run cannot be renamed"):
        await agentrl_runs(run_config, *words, new.run_name)
    assert output.is_dir()
    assert await run_exists(run_config)
    assert not await run_exists(new)
