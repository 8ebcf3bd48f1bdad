"""``agentrl status`` on a real database: the runs of a server, one run, and what cannot be read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from small_run import build

from agentrl.cli.main import main
from agentrl.config.load import Configs
from agentrl.config.schema import EngineConfig, RunConfig
from agentrl.errors import StoreUnavailableError
from agentrl.local.mongod import EmbeddedMongo
from agentrl.screens import cli
from agentrl.store.client import open_existing, open_store

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedMongo]:
    """A server with the small run ``watched``; it stops afterwards."""
    mongo = EmbeddedMongo(tmp_path_factory.mktemp("status-mongo"))
    try:
        run = RunConfig(run_name="watched", db_connection_string=mongo.up().uri)
        asyncio.run(_fill(run, tmp_path_factory.mktemp("weights")))
        yield mongo
    finally:
        mongo.down()


async def _fill(run: RunConfig, weights: Path) -> None:
    async with await open_store(run) as store:
        await build(store, weights)
        await store.trainer_lease.acquire("trainer-1", "host", 1, 600.0)
        client = store.connection.client
        await client.admin.command("createUser", "stranger", pwd="p", roles=[])


def _flags(server: EmbeddedMongo) -> tuple[str, str]:
    return ("--db_connection_string", server.status().uri)


def test_the_runs_of_the_server(server: EmbeddedMongo, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *_flags(server)]) == 0
    page = capsys.readouterr().out
    assert any(line.split()[:3] == ["watched", "training", "1"] for line in page.splitlines())
    assert main(["status", "--json", *_flags(server)]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["name"], run["steps"], run["trainer"]) == ("watched", 1, True)


def test_one_run(server: EmbeddedMongo, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "watched", *_flags(server)]) == 0
    page = capsys.readouterr().out
    parts = [
        "watched  training",
        "2 ready, 0 planned, 2 trained",
        "trainer-1",
        "engine 2  the engine went away",
        "sampler (1)",
    ]
    assert [part for part in parts if part not in page] == []
    assert "\x1b" not in page
    assert main(["status", "--json", "--run_name", "watched", *_flags(server)]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["activity"], value["queues"]["data_ready"], value["rates"]["failed"]) == ("training", 2, 2)
    assert value["disk"]["run"] > 0


def test_tables_of_the_database_as_json(server: EmbeddedMongo, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--run_name", "watched", *_flags(server))
    assert main(["db", "check", "--json", "--settle_seconds", "0", *where]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["violations"] == []
    assert report["invariants"][0]["checked"]["Records"] == 10
    assert main(["tasks", "list", "--json", *where]) == 0
    first = json.loads(capsys.readouterr().out)["epochs"][0]
    assert (first["split"], first["epoch"], first["tasks"]["completed"]) == ("eval", 0, 1)


def test_the_embedded_server_as_json(server: EmbeddedMongo, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mongo", "status", "--json", "--mongo_dir", str(server.directory)]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["running"] is True
    assert server.status().password not in out
    assert main(["mongo", "status", "--json", "--mongo_dir", str(server.directory / "none")]) == 3
    assert json.loads(capsys.readouterr().out)["uri"] is None
    assert main(["mongo", "uri", "--json", "--mongo_dir", str(server.directory)]) == 2


def test_a_run_that_does_not_exist(server: EmbeddedMongo, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "wacthed", *_flags(server)]) == 1
    assert "did you mean watched?" in capsys.readouterr().err


def test_a_user_without_rights(server: EmbeddedMongo, capsys: pytest.CaptureFixture[str]) -> None:
    password = quote(EmbeddedMongo(server.directory).status().password, safe="")
    uri = server.status().uri.replace(f"agentrl:{password}@", "stranger:p@")
    assert "stranger" in uri
    assert main(["status", "watched", "--db_connection_string", uri]) == 1
    assert "refused the user" in capsys.readouterr().err


async def test_a_server_that_goes_away_is_an_outage(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "mongo")
    try:
        run = RunConfig(run_name="r", db_connection_string=mongo.up().uri, db_timeout_seconds=1.0)
        async with await open_store(run):
            pass
        async with await open_existing(run) as store:
            read = cli._run_reader(store, Configs([run, EngineConfig()]))
            assert (await read()).value["activity"] == "idle"
            mongo.down()
            with pytest.raises(StoreUnavailableError):
                await read()
    finally:
        mongo.down()
