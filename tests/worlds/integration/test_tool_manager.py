"""``agentrl tools manager`` as a process, called by the sampler's own client: nodes, bounds, isolation."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import yaml
from tiny_vision import drawn
from waiting import until

from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerConfigError, ToolServerError
from agentrl.tools.pool import ToolPool
from agentrl.tools.tool import TrajectoryInfo, schema_name
from agentrl.worlds.sandbox.local import namespace_problem

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("starts_warm"),
    pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no /usr/bin/python3"),
]

REAL = sys.executable
"""The real Python, before a test starts warm."""
NOTES = """
import json, os, socket, sys
kept = []

def keep(text):
    kept.append(text)
    return " ".join(kept)

def process():
    return str(os.getpid())

def fail():
    raise OSError

def reads(path):
    return open(path).read()

def writes(path):
    return str(open(path, "w").write("x"))

def connects(port):
    return str(socket.create_connection(("127.0.0.1", port), 2).close())

def variable(name):
    return os.environ[name]

def picture():
    image = {"type": "image", "data": "PICTURE", "mimeType": "image/png"}
    return [{"type": "text", "text": "a square"}, image]

tools = {each.__name__: each for each in (keep, process, fail, reads, writes, connects, variable, picture)}
for line in sys.stdin:
    asked = json.loads(line)
    given, result, error = asked.get("params", {}), {}, False
    if asked["method"] == "initialize":
        result = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "notes", "version": "1"}}
    elif asked["method"] == "tools/list":
        result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools]}
    elif asked["method"] == "tools/call":
        try:
            said = tools[given["name"]](**given["arguments"])
        except OSError as problem:
            said, error = type(problem).__name__, True
        content = said if isinstance(said, list) else [{"type": "text", "text": said}]
        result = {"content": content, "isError": error}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
"""An MCP server of the standard library: in a sandbox, root's own interpreter may be out of reach."""
PYTHON = "/usr/bin/python3"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter, as a sandbox of root needs it; pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="agentrl-test-") as created:
        path = Path(created)
        path.chmod(0o755)
        (path / "notes.py").write_text(NOTES.replace("PICTURE", base64.b64encode(drawn()).decode()))
        yield path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., str]]:
    """Return a function that starts a manager of ``servers`` and returns its URL."""
    started: list[subprocess.Popen[str]] = []

    def begin(servers: dict[str, object], *flags: str, token: str | None = None) -> str:
        file = folder / "servers.yml"
        file.write_text(yaml.safe_dump({"servers": servers}))
        command = [
            sys.executable, "-m", "agentrl", "tools", "manager", "--mcp_servers_file", str(file),
            "--port", "0", *flags,
        ]  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if key != "MCP_AUTH_TOKEN"}
        if token is not None:
            environment["MCP_AUTH_TOKEN"] = token
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("manager: "), line
        return line.split()[1]

    yield begin
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()


def notes(folder: Path, **more: object) -> dict[str, object]:
    return {"notes": {"command": PYTHON, "args": [str(folder / "notes.py")], "warm": 0, **more}}


def of(url: str) -> ToolPool:
    return ToolPool(ToolConfig(mcp_manager_url=url))


async def ask(pool: ToolPool, trajectory: str, tool: str, **arguments: object) -> str:
    async with pool.session(TrajectoryInfo(id=trajectory)) as tools:
        return (await tools.call(tool, arguments)).text


async def test_each_trajectory_has_a_node_that_ends_with_it(start: Callable[..., str], folder: Path) -> None:
    async with of(start(notes(folder))) as pool:
        assert "keep" in [schema_name(schema) for schema in pool.list()]
        first, second = (pool.session(TrajectoryInfo(id=f"train/0/t/0/{n}")) for n in (0, 1))
        async with first as one, second as two:
            assert [(await one.call("keep", {"text": text})).text for text in "ab"] == ["a", "a b"]
            assert (await two.call("keep", {"text": "c"})).text == "c"
            assert (await two.call("fail", {})).error
            seen = await two.call("picture", {})
            assert [image.data for image in seen.images] == [drawn()]
            assert seen.text.count("[image, image/png") == 1
            pids = [int((await tools.call("process", {})).text) for tools in (one, two)]
            assert len(set(pids)) == 2
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert await ask(pool, "train/0/t/0/0", "keep", text="d") == "d"


async def test_an_idle_node_ends_and_too_many_are_an_outage(start: Callable[..., str], folder: Path) -> None:
    url = start(notes(folder), "--max_nodes", "1", "--idle_seconds", "1")
    async with of(url) as pool, pool.session(TrajectoryInfo(id="a")) as tools:
        assert (await tools.call("keep", {"text": "x"})).text == "x"
        with pytest.raises(ToolServerError, match="all nodes are in use") as caught:
            await ask(pool, "b", "process")
        assert caught.value.outage is not None
        pid = int((await tools.call("process", {})).text)
        await until(lambda: not Path(f"/proc/{pid}").exists())
        assert await ask(pool, "b", "keep", text="y") == "y"


async def test_only_who_has_the_token_is_served(start: Callable[..., str], folder: Path) -> None:
    url = start(notes(folder), token="a-long-secret")
    with pytest.raises(ToolServerConfigError, match="401"):
        await of(url).open()
    headers = {"Authorization": "Bearer a-long-secret"}
    async with httpx2.AsyncClient(base_url=url, headers=headers) as client:
        assert (await client.get("/servers")).json()["servers"] == ["notes"]
        assert (await client.post("/tool/keep", json={"text": "x"})).json() == {
            "status": "success", "content": "x",
        }  # fmt: skip
        assert (await client.post("/tool/none", json={})).status_code == 404
        assert (await client.post("/tool/keep", content="[1]")).json()["status_code"] == 422
        assert (await client.get("/server/other/tools")).status_code == 404
        assert len((await client.get("/tools")).json()["tools"]) == 8


@pytest.mark.parametrize(
    "isolation",
    [
        "limits",
        pytest.param(
            "namespaces", marks=pytest.mark.skipif(namespace_problem() is not None, reason="no namespaces")
        ),
    ],
)
async def test_a_server_in_a_sandbox_reaches_its_own_folder_only(
    start: Callable[..., str], folder: Path, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", REAL)  # a sandbox shows the program no other one
    secret = folder / "secret"
    secret.write_text("hidden")
    sandbox = {"isolation": isolation, "visible": [str(folder / "notes.py")]}
    url = start(notes(folder, sandbox=sandbox, env={"KEY": "value"}))
    port = int(url.split(":")[2].split("/")[0])
    async with of(url) as pool, pool.session(TrajectoryInfo(id="a")) as tools:

        async def said(tool: str, **arguments: object) -> str:
            return (await tools.call(tool, arguments)).text

        assert await said("keep", text="x") == "x"
        assert await said("variable", name="KEY") == "value"
        assert await said("reads", path=str(secret)) in ("FileNotFoundError", "PermissionError")
        assert await said("writes", path=str(folder / "new")) in ("FileNotFoundError", "PermissionError")
        assert await said("writes", path="own") == "1"
        reached = await said("connects", port=port)
        assert (reached == "None") == (isolation == "limits"), reached
    assert not (folder / "new").exists()
