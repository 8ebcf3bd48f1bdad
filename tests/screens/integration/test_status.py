"""``agentrl status`` on a real database: the runs of a server, one run, and what cannot be read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from small_run import build

from agentrl.cli.main import main
from agentrl.config.load import Configs
from agentrl.config.schema import EngineConfig, RunConfig
from agentrl.errors import StoreUnavailableError
from agentrl.local.mongod import EmbeddedMongo
from agentrl.screens import screens_cli
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


@pytest.fixture
def said(server: EmbeddedMongo, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command on the server; return its output, or its errors where ``code`` is 1."""

    def run(*words: str, code: int = 0, where: Sequence[str] | None = None) -> str:
        flags = ("--db_connection_string", server.status().uri) if where is None else where
        assert main([*words, *flags]) == code
        out, err = capsys.readouterr()
        return err if code == 1 else out

    return run


def test_the_runs_of_the_server(said: Callable[..., str]) -> None:
    assert any(line.split()[:3] == ["watched", "training", "1"] for line in said("status").splitlines())
    (run,) = json.loads(said("status", "--json"))["runs"]
    assert (run["name"], run["steps"], run["trainer"]) == ("watched", 1, True)


def test_one_run(said: Callable[..., str]) -> None:
    page = said("status", "watched")
    parts = [
        "watched  training", "2 ready, 0 planned, 2 trained", "trainer-1", "engine 2  the engine went away",
        "sampler (1",
    ]  # fmt: skip
    assert [part for part in parts if part not in page] == []
    assert "\x1b" not in page
    value = json.loads(said("status", "--json", "--run_name", "watched"))
    assert (value["activity"], value["queues"]["data_ready"], value["rates"]["failed"]) == ("training", 2, 2)
    assert value["disk"]["run"] > 0
    assert (value["costs"]["total"], value["costs"]["shares"][0]["of"]) == (None, "run")


def test_what_a_run_costs(said: Callable[..., str], tmp_path: Path) -> None:
    prices = tmp_path / "prices.yml"
    prices.write_text("tool_second: 100")
    value = json.loads(said("status", "watched", "--json", "--prices", str(prices)))
    assert value["costs"]["total"] == pytest.approx(100 * value["costs"]["tool_seconds"])
    assert value["costs"]["total"] > 0
    assert "an informative group" in said("audit", "run", "--run_name", "watched", "--prices", str(prices))
    rows = json.loads(said("audit", "records", "--json", "--run_name", "watched"))
    assert {"generate_seconds", "tool_seconds", "judge_seconds", "api_cost"} <= rows[0].keys()


def test_tables_of_the_database_as_json(said: Callable[..., str]) -> None:
    report = json.loads(said("db", "check", "--json", "--settle_seconds", "0", "--run_name", "watched"))
    assert report["violations"] == []
    assert report["invariants"][0]["checked"]["Records"] == 10
    first = json.loads(said("tasks", "list", "--json", "--run_name", "watched"))["epochs"][0]
    assert (first["split"], first["epoch"], first["tasks"]["completed"]) == ("eval", 0, 1)


def test_the_embedded_server_as_json(server: EmbeddedMongo, said: Callable[..., str]) -> None:
    out = said("mongo", "status", "--json", where=("--mongo_dir", str(server.directory)))
    assert json.loads(out)["running"] is True
    assert server.status().password not in out
    nowhere = ("--mongo_dir", str(server.directory / "none"))
    assert json.loads(said("mongo", "status", "--json", code=3, where=nowhere))["uri"] is None
    said("mongo", "uri", "--json", code=2, where=("--mongo_dir", str(server.directory)))


def test_a_run_that_does_not_exist(said: Callable[..., str]) -> None:
    assert "did you mean watched?" in said("status", "wacthed", code=1)


def test_a_user_without_rights(server: EmbeddedMongo, said: Callable[..., str]) -> None:
    password = quote(EmbeddedMongo(server.directory).status().password, safe="")
    uri = server.status().uri.replace(f"agentrl:{password}@", "stranger:p@")
    assert "stranger" in uri
    assert "refused the user" in said("status", "watched", code=1, where=("--db_connection_string", uri))


async def test_a_server_that_goes_away_is_an_outage(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "mongo")
    try:
        run = RunConfig(run_name="r", db_connection_string=mongo.up().uri, db_timeout_seconds=1.0)
        async with await open_store(run):
            pass
        async with await open_existing(run) as store:
            read = screens_cli._run_reader(store, Configs([run, EngineConfig()]))
            assert (await read()).value["activity"] == "idle"
            mongo.down()
            with pytest.raises(StoreUnavailableError):
                await read()
    finally:
        mongo.down()
