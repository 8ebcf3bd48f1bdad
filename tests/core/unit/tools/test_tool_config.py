"""Test reading the servers file and the manager URL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.base.registry import Registry
from agentrl.config.schema import ToolConfig
from agentrl.errors import ConfigError
from agentrl.tools.config import (
    Hook,
    HttpSpec,
    Isolate,
    Limits,
    ManagerSpec,
    Scope,
    StdioSpec,
    load_servers,
)
from agentrl.tools.pool import configured_servers


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
        ("servers: {calc: x}", r":1: servers.calc is 'x'; it must be a mapping"),
        ("servers: {calc: {}}", "needs either 'command' or 'url'"),
        ("servers: {calc: {command: x, url: y}}", "needs either"),
        ("servers:\n  calc:\n    command: x\n    arg: []", r":4: unknown key 'servers.calc.arg'\n.* 'args'"),
        ("servers: {calc: {command: x, args: y}}", "args is 'y'; it must be a list"),
        ("servers: {calc: {url: 3}}", "url is 3; it must be text"),
        ("servers: {calc: {url: 'http://x', headers_env: {A: NOT_SET_HERE}}}", "NOT_SET_HERE, which is not"),
        ("servers: {calc: {command: '${NOT_SET_HERE}'}}", "variable NOT_SET_HERE, which is not set"),
        ("servers: {calc: {command: x, scope: mine}}", "scope is 'mine'"),
        ("servers: {calc: {url: 'http://x', transport: stdio}}", "transport is 'stdio'; it must be 'http'"),
        ("servers: {calc: {url: 'http://x', reset: clear}}", "reset clears a trajectory's own server"),
        ("servers: {calc: {url: 'ftp://x/mcp'}}", "calc.url is not a URL of HTTP"),
        ("servers: {calc: {url: 'http:///mcp'}}", "calc.url is not a URL of HTTP"),
        ("servers: {calc: {command: x, setup: [{call: y}]}}", r"unknown key 'servers.calc.setup\[0\].call'"),
        ("servers: {calc: {command: x, setup: [3]}}", r"setup\[0\] is 3; it must be a tool's name or"),
        ("servers: {calc: {command: x, env: {A: [1]}, cwd: ''}}", "env.A is .*; it must be text\n.*cwd is"),
        ("servers: {calc: {command: x, limits: {speed: 1}}}", "unknown key 'servers.calc.limits.speed'"),
        ("servers: {calc: {command: x, limits: {concurrency: 0}}}", "concurrency is 0; it must be above 0"),
        ("servers: {calc: {command: x, ordered: 1}}", "ordered is 1; it must be true or false"),
        (
            "servers: {calc: {command: x, state: snapshot}}",
            "state is 'snapshot', and the files of a tool serv",
        ),
        ("servers: {calc: {url: 'http://x', tools: {a: {state: kept}}}}", "tools.a.state is 'kept'"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_servers(write(tmp_path, text))


ENTRY = """
servers:
  db:
    command: ${SHELL_HERE}
    args: [--db, "${workdir}/data.db", "${env:PORT_HERE:-80}", "$HOME", "a${SHELL_HERE}b"]
    env: {TOKEN: "${TOKEN_HERE}"}
    warm: 3
    ordered: true
    setup: [{tool: load, arguments: {file: "${meta.file}"}}, ping]
    teardown: {tool: save}
    reset: clear
    offer: [query]
    resources: true
    limits: {timeout_seconds: 5, concurrency: 4}
    state: outside
    tools: {query: {calls_per_minute: 30, concurrency: 1, state: stateless}}
  web: {url: "https://${HOST_HERE}/sse", transport: sse, scope: trajectory}
"""


def test_every_key_is_read_and_variables_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SHELL_HERE": "sh", "TOKEN_HERE": "t:1", "HOST_HERE": "h"}.items():
        monkeypatch.setenv(name, value)
    db, web = load_servers(write(tmp_path, ENTRY))
    assert isinstance(db, StdioSpec)
    assert db.command == "sh"
    assert db.args == ("--db", "${workdir}/data.db", "80", "$HOME", "ashb")
    assert db.env == {"TOKEN": "t:1"}
    options = db.options
    assert (options.scope, options.offer) == (Scope.TRAJECTORY, ("query",))
    assert (options.warm, options.ordered) == (3, True)
    assert options.setup == (Hook(tool="load", arguments={"file": "${meta.file}"}), Hook(tool="ping"))
    assert (options.teardown, options.reset) == ((Hook(tool="save"),), Hook(tool="clear"))
    assert (options.resources, options.prompts) == (True, False)
    base = Limits(timeout_seconds=60, max_result_chars=100)
    assert options.limits_of("query", base) == Limits(
        concurrency=1, calls_per_minute=30, timeout_seconds=5, max_result_chars=100
    )
    assert options.limits_of("other", base).concurrency == 4
    declared = [options.state_of(tool, reads=False, repeatable=False) for tool in ("query", "other")]
    assert declared == ["stateless", "outside"]
    assert isinstance(web, HttpSpec)
    assert (web.url, web.sse, web.options.scope) == ("https://h/sse", True, Scope.TRAJECTORY)


def test_the_json_of_other_clients_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_HERE", "k")
    path = tmp_path / "claude_desktop_config.json"
    path.write_text(
        """{"globalShortcut": "", "mcpServers": {
        "files": {"command": "npx", "args": ["-y", "fs", "/data"], "type": "stdio", "autoApprove": ["read"]},
        "web": {"type": "http", "url": "https://h/mcp", "headers": {"Authorization": "Bearer ${KEY_HERE}"}},
        "old": {"type": "sse", "url": "https://h/sse", "tools": ["*"], "timeout": 30000},
        "gemini": {"httpUrl": "https://g/mcp", "trust": true},
        "off": {"command": "x", "disabled": true}}}"""
    )
    assert load_servers(path) == [
        StdioSpec(name="files", command="npx", args=("-y", "fs", "/data")),
        HttpSpec(name="web", url="https://h/mcp", headers={"Authorization": "Bearer k"}),
        HttpSpec(name="old", url="https://h/sse", sse=True),
        HttpSpec(name="gemini", url="https://g/mcp"),
    ]


def test_manager_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_AUTH_TOKEN", "secret")
    headers = {"Authorization": "Bearer secret"}
    manager = ToolConfig(mcp_manager_url="http://h:8000/mcpapi/")
    expected = ManagerSpec(url="http://h:8000/mcpapi", server="all", headers=headers)
    assert configured_servers(manager) == [expected]
    plain = ToolConfig(mcp_manager_url="http://h/mcp", mcp_server_name="search")
    assert configured_servers(plain) == [HttpSpec(name="search", url="http://h/mcp", headers=headers)]
    assert configured_servers(ToolConfig()) == []


@pytest.mark.parametrize("key", ["servers", "mcpServers"])
def test_a_server_in_a_sandbox_that_is_not_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(
        "agentrl.tools.config.SERVER_SANDBOXES", Registry[Isolate]("sandbox", group="agentrl.none")
    )
    for sandbox in ("{}", "{isolation: docker, image: x}", "false", "[]"):
        path = tmp_path / "servers.yml"
        path.write_text(f"{key}:\n  one:\n    command: ls\n    sandbox: {sandbox}\n")
        with pytest.raises(ConfigError, match=rf"yml:4: {key}.one.sandbox: agentrl.worlds, which has the"):
            load_servers(path)
