"""Names that a run cannot have, and commands that only look: nothing is created."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.lab.database_server import ServerInfos
from agentrl.store.client import Store, open_connection, open_store

pytestmark = pytest.mark.integration


async def databases(store: Store) -> set[str]:
    return set(await store.database.client.list_database_names())


async def test_a_name_that_differs_in_case_alone_is_refused(store: Store, run_config: RunConfig) -> None:
    before = await databases(store)
    other = replace(run_config, run_name=run_config.run_name.upper())
    for opens in (open_store, open_connection):
        with pytest.raises(ConfigError, match="names must differ in more than case") as caught:
            await opens(other)
        assert run_config.run_name in str(caught.value)
    assert await databases(store) <= before


@pytest.mark.parametrize("name", ["admin", "Local", "CONFIG"])
@pytest.mark.parametrize("command", ["sample", "train", "serve", "quickstart", "doctor"])
def test_names_of_the_servers_own_databases_create_nothing(
    name: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets/configs").mkdir(parents=True)
    assert main([command, "--run_name", name]) == 2
    assert "MongoDB's own databases" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]


async def test_the_doctor_creates_nothing(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.local.doctor import database_checks, service_checks

    monkeypatch.chdir(tmp_path)
    before = await databases(store)
    (missing,) = await service_checks(replace(run_config, run_name="not_there_yet"), 10)
    assert (missing.state, "not created yet" in missing.found) == ("ok", True)
    (there,) = await service_checks(run_config, 10)
    assert (there.state, "exists; no engine is alive" in there.found) == ("ok", True)
    checks = await database_checks(replace(run_config, run_name="not_there_yet"))
    assert "database" in [check.name for check in checks]
    assert await databases(store) <= before
    assert "not_there_yet" not in before


async def test_the_free_space_of_a_server_is_known_before_the_run_exists(run_config: RunConfig) -> None:
    connection = await open_connection(run_config)
    try:
        info = await ServerInfos(connection).read()
    finally:
        await connection.close()
    assert info.free_bytes is not None
    assert info.free_bytes > 0
