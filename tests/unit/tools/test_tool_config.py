"""Test reading the servers file and the manager URL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.config.schema import ToolConfig
from agentrl.errors import ConfigError
from agentrl.tools.config import configured_servers, load_servers
from agentrl.tools.specs import HttpSpec, ManagerSpec, StdioSpec


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "servers.yml"
    path.write_text(text)
    return path


def test_both_kinds_of_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEB_TOKEN", "t")
    path = write(
        tmp_path,
        "servers:\n  calc: {command: python, args: [-m, calc, 3], env: {A: 1}}\n"
        "  web: {url: 'http://h/mcp', headers: {X: y}, headers_env: {Authorization: WEB_TOKEN}}\n",
    )
    assert load_servers(path) == [
        StdioSpec(name="calc", command=sys.executable, args=("-m", "calc", "3"), env={"A": "1"}),
        HttpSpec(name="web", url="http://h/mcp", headers={"X": "y", "Authorization": "t"}),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "is not YAML"),
        ("calc: {command: x}", "neither a mapping 'servers' nor 'mcpServers'"),
        ("servers: {calc: x}", "servers.calc is not a mapping"),
        ("servers: {calc: {}}", "needs either 'command' or 'url'"),
        ("servers: {calc: {command: x, url: y}}", "needs either"),
        ("servers: {calc: {command: x, arg: []}}", "unknown keys: arg"),
        ("servers: {calc: {command: x, args: y}}", "args is 'y'; it must be a list"),
        ("servers: {calc: {url: 3}}", "url is 3; it must be text"),
        ("servers: {calc: {url: x, headers_env: {A: NOT_SET_HERE}}}", "names NOT_SET_HERE, which is not set"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_servers(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yml cannot be read"):
        load_servers(tmp_path / "none.yml")


def test_manager_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_AUTH_TOKEN", "secret")
    headers = {"Authorization": "Bearer secret"}
    manager = ToolConfig(mcp_manager_url="http://h:8000/mcpapi/")
    assert configured_servers(manager) == [
        ManagerSpec(url="http://h:8000/mcpapi", server="all", headers=headers)
    ]
    plain = ToolConfig(mcp_manager_url="http://h/mcp", mcp_server_name="search")
    assert configured_servers(plain) == [HttpSpec(name="search", url="http://h/mcp", headers=headers)]
    assert configured_servers(ToolConfig()) == []
