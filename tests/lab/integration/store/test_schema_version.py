"""The schema version of a run on a real server: another one is refused, and never taken for this code's."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from db_command import agentrl_db

from agentrl.config.schema import RunConfig
from agentrl.errors import SchemaVersionError, StoreError
from agentrl.lab.transfer import Transfer
from agentrl.store.client import Store, open_connection, open_existing, open_store, run_exists
from agentrl.store.mechanics.connection import SCHEMA_VERSION

pytestmark = pytest.mark.integration

WHAT_TO_DO = "start a new run, or export it with the AgentRL that wrote it"


async def store_version(store: Store, version: int | None) -> None:
    """Write another version into the run, or none, as another AgentRL would have."""
    await store.database["Run"].delete_many({})
    if version is not None:
        await store.database["Run"].insert_one({"_id": "schema", "version": version})


@pytest.mark.parametrize("version", [None, 9])
async def test_a_run_of_another_version_is_refused_in_one_sentence_and_left_as_it_is(
    store: Store, run_config: RunConfig, tmp_path: Path, version: int | None
) -> None:
    await store_version(store, version)
    before = await contents(store)
    what = f"run '{run_config.run_name}' has schema version {version}, and this AgentRL reads version"
    for opening in (open_store, open_existing, run_exists):
        with pytest.raises(SchemaVersionError) as refused:
            await opening(run_config)
        assert refused.value.message == f"{what} {SCHEMA_VERSION} only"
        assert refused.value.hint == WHAT_TO_DO
    for words in (
        ("check",),
        ("export", str(tmp_path / "copy")),
        ("reopen",),
        ("prune", "--before_step", "1"),
    ):
        with pytest.raises(SchemaVersionError, match=what):
            await agentrl_db(run_config, *words)
    assert not (tmp_path / "copy").exists()
    assert await contents(store) == before


async def contents(store: Store) -> Mapping[str, Any]:
    return {
        name: await store.database[name].find().to_list()
        for name in await store.database.list_collection_names(filter={"type": "collection"})
        if not name.startswith("system.")
    }


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 9])
async def test_an_export_of_another_version_is_refused_before_anything_is_written(
    store: Store, run_config: RunConfig, tmp_path: Path, version: int
) -> None:
    folder = tmp_path / "run"
    await Transfer(store.connection).export(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "schema": version}))
    vacant = dataclasses.replace(run_config, run_name=f"{run_config.run_name}_copy")
    with pytest.raises(StoreError, match=f"schema version {version}, and this AgentRL reads 1 and 1 only"):
        await agentrl_db(vacant, "import", str(folder))
    connection = await open_connection(run_config)
    assert vacant.run_name not in await connection.client.list_database_names()
    await connection.close()


async def test_a_new_run_has_this_version_however_many_make_it(run_config: RunConfig) -> None:
    stores = await asyncio.gather(*(open_store(run_config) for _ in range(8)))
    schema = await stores[0].database["Run"].find_one({"_id": "schema"})
    assert schema["version"] == SCHEMA_VERSION
    await stores[0].database.client.drop_database(run_config.run_name)
    for store in stores:
        await store.close()


async def test_a_mistyped_run_is_an_error_that_lists_the_runs(store: Store, run_config: RunConfig) -> None:
    wrong = dataclasses.replace(run_config, run_name=f"{run_config.run_name}x")
    for words in (("check",), ("prune", "--older_than_days", "1"), ("reopen",), ("rescore",)):
        with pytest.raises(StoreError, match=f"there is no run '{wrong.run_name}'") as raised:
            await agentrl_db(wrong, *words)
        assert f"did you mean {run_config.run_name}? runs: " in str(raised.value)
    assert wrong.run_name not in await store.database.client.list_database_names()
