"""``agentrl doctor`` on the services of a run: database, agent configuration, tool servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.cli.doctor.services import check_agent_config, check_mongod, check_tools
from agentrl.config.schema import RunConfig, SamplingConfig, ToolConfig
from agentrl.errors import StoreError


async def test_the_agent_config_is_optional_but_must_be_right(tmp_path: Path) -> None:
    path = tmp_path / "agent.yml"
    assert (await check_agent_config(SamplingConfig(agent_config_path=str(path)))).state == "warn"
    path.write_text("scorer_agent: {}")
    assert (await check_agent_config(SamplingConfig(agent_config_path=str(path)))).state == "fail"


async def test_tool_servers_that_do_not_start_fail(tmp_path: Path) -> None:
    file = tmp_path / "servers.yml"
    file.write_text(
        f"servers:\n  broken:\n    command: {sys.executable}\n    args: ['-c', 'raise SystemExit(3)']\n"
    )
    assert (await check_tools(ToolConfig(mcp_servers_file=str(file)))).state == "fail"
    assert (await check_tools(ToolConfig())).state == "ok"


@pytest.mark.parametrize(("uri", "state"), [(None, "fail"), ("mongodb://h", "ok")])
def test_the_embedded_server_needs_its_binary(
    uri: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> Path:
        raise StoreError("no mongod is installed", hint="pip install it")

    monkeypatch.setattr("agentrl.store.embedded.mongod.choose_mongod", gone)
    assert check_mongod(RunConfig(db_connection_string=uri)).state == state
