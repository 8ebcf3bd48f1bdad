"""Entries with ``sandbox``: what is refused, and the container of a server over stdio."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from open_tools import open_tools
from path_programs import stand_in

from agentrl.config.schema import ToolConfig
from agentrl.errors import ConfigError
from agentrl.tools.config import McpSpec, StdioSpec, load_servers

DOCKER = """#!{python}
import os, sys
arguments = sys.argv[1:]
print(*arguments, file=open({log!r}, "a"))
entry = arguments.index("--entrypoint")
os.execv(sys.executable, [sys.executable, *arguments[entry + 3:]])
"""
SERVER = """
import os
from mcp.server.mcpserver import MCPServer
server = MCPServer("one", log_level="ERROR")
@server.tool(structured_output=False)
def key() -> str:
    return os.environ["KEY"]
server.run("stdio")
"""


def entry(tmp_path: Path, sandbox: Any, **more: Any) -> McpSpec:
    file = tmp_path / "servers.yml"
    content = {"servers": {"one": {"command": "python", "sandbox": sandbox, **more}}}
    file.write_text(yaml.safe_dump(content))
    return load_servers(file)[0]


@pytest.mark.parametrize(
    ("sandbox", "said"),
    [
        ([], "must be a mapping"),
        ({"isolation": "jail"}, "isolation is 'jail'"),
        ({"image": "x"}, "are Docker's"),
        ({"network": "tools"}, "are Docker's"),
        ({"isolation": "docker"}, "image is None; it must be the image"),
        ({"memory": 3}, "unknown key 'servers.one.sandbox.memory'"),
        ({"memory_mb": 0}, "memory_mb is 0"),
    ],
)
def test_a_wrong_sandbox_is_refused_by_its_name(tmp_path: Path, sandbox: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        entry(tmp_path, sandbox)


def test_a_folder_of_the_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no 'cwd' of the host"):
        entry(tmp_path, {}, cwd="/data")


def test_values_of_variables_are_no_arguments(tmp_path: Path) -> None:
    for sandbox in ({"isolation": "limits"}, {"isolation": "docker", "image": "x"}):
        spec = entry(tmp_path, sandbox, env={"KEY": "a-secret-value"})
        assert isinstance(spec, StdioSpec)
        assert "a-secret-value" not in " ".join(spec.args)
        assert spec.env["KEY"] == "a-secret-value"


async def test_a_container_has_every_limit_and_the_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = DOCKER.format(python=sys.executable, log=str(tmp_path / "log"))
    stand_in(monkeypatch, tmp_path, "docker", docker)
    (tmp_path / "server.py").write_text(SERVER)
    entry(
        tmp_path, {"isolation": "docker", "image": "python:3.12", "memory_mb": 64, "network": "tools"},
        args=[str(tmp_path / "server.py")], env={"KEY": "value"}, warm=0,
    )  # fmt: skip
    async with open_tools(ToolConfig(mcp_servers_file=str(tmp_path / "servers.yml"))) as tools:
        assert (await tools.call("key", {})).text == "value"
    said = (tmp_path / "log").read_text()
    for part in (
        "run --interactive --init --rm", "--network tools", "--read-only", "--cap-drop ALL", "--memory 64m",
        "--pids-limit 70", "--user 65534:65534", "--env HOME=/work", "--env KEY",
        "--entrypoint python3 python:3.12",
    ):  # fmt: skip
        assert part in said
