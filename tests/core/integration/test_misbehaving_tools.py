"""Tool servers that misbehave on purpose: every misbehaviour ends in a reply or in a named failure."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from open_tools import open_tools
from server_process import end_server, start_server

from agentrl.base.processes import free_port
from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerConfigError, ToolServerError, tool_server
from agentrl.tools.mcp import server
from agentrl.tools.pool import ToolPool
from agentrl.tools.tool import ToolSession, TrajectoryInfo, schema_name

pytestmark = pytest.mark.integration

SERVER = str(Path(__file__).parent / "servers" / "misbehaving_server.py")


def config_of(tmp_path: Path, entry: dict[str, Any], **flags: Any) -> ToolConfig:
    path = tmp_path / "servers.yml"
    path.write_text(yaml.safe_dump({"servers": {"misbehaving": entry}}))
    return ToolConfig(mcp_servers_file=str(path), **flags)


def stdio(**options: Any) -> dict[str, Any]:
    return {"command": "python", "args": [SERVER, "stdio"], **options}


def trajectory(number: int = 0, **meta: Any) -> TrajectoryInfo:
    return TrajectoryInfo(id=f"train/0/t/{number}", meta=meta)


class Web:
    """The HTTP server, which tests may kill and start again."""

    def __init__(self, python: Path) -> None:
        self._python, self.port = python, free_port()
        self.restart()

    def entry(self, path: str = "mcp", **options: Any) -> dict[str, Any]:
        return {"url": f"http://127.0.0.1:{self.port}/{path}", **options}

    def stop(self) -> None:
        end_server(self._process, self.port)

    def restart(self) -> None:
        self._process = start_server(self.port, self._python, SERVER, str(self.port))


@pytest.fixture
def web(warm_python: Path) -> Iterator[Web]:
    server = Web(warm_python)
    yield server
    server.stop()


def _join(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and " Z " not in stat.read_text():
        time.sleep(0.01)


async def wait_until_gone(pid: int) -> None:
    async with asyncio.timeout(10):
        await asyncio.to_thread(_join, pid)


async def pid_of(tools: ToolSession) -> int:
    return int((await tools.call("pid", {})).text.partition("\n")[0])


async def test_a_hung_call_is_stopped_and_the_server_stays(tmp_path: Path) -> None:
    async with open_tools(config_of(tmp_path, stdio(tools={"hang": {"timeout_seconds": 0.3}}))) as tools:
        before = await pid_of(tools)
        hung = await tools.call("hang", {})
        assert (hung.text, hung.error) == ("hang was stopped: it did not answer within 0.3 s", True)
        assert await pid_of(tools) == before


async def test_a_server_that_answers_nothing_any_more_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.tools.mcp.connection.PROBE_SECONDS", 0.3)
    async with open_tools(config_of(tmp_path, stdio(tools={"read": {"timeout_seconds": 0.3}}))) as tools:
        before = await pid_of(tools)
        os.kill(before, signal.SIGSTOP)
        frozen = await tools.call("read", {})
        assert "did not answer within 0.3 s" in frozen.text
        assert "was restarted; its earlier state is lost" in frozen.text
        assert await pid_of(tools) != before


async def test_progress_extends_the_timeout_up_to_the_longest_call(tmp_path: Path) -> None:
    limits = {"timeout_seconds": 1.0, "max_seconds": 2.5}
    async with open_tools(config_of(tmp_path, stdio(limits=limits))) as tools:
        slow = await tools.call("progress", {"steps": 8, "seconds": 0.2})
        assert (slow.text, slow.error) == ("progress done", False)
        assert slow.seconds > 1.0
        endless = await tools.call("progress", {"steps": 1000, "seconds": 0.2})
        assert endless.error
        assert endless.seconds > 2.4


async def test_garbage_is_skipped_and_endless_garbage_ends_the_server(
    tmp_path: Path,
) -> None:
    async with open_tools(config_of(tmp_path, stdio())) as tools:
        assert (await tools.call("noise", {})).text == "noise done"
        before = await pid_of(tools)
        endless = await tools.call("garbage", {})
        assert endless.error
        assert "stopped while it ran" in endless.text
        assert await pid_of(tools) != before


PRINTING = """
import json, sys
print("Loading ...", flush=True)
PRINTED = {"line": "debug: 1\\n", "half": '{"a": 1}\\nadding {', "last": "no database\\n"}
SERVER = {"name": "p", "version": "1"}
tools = [{"name": name, "inputSchema": {"type": "object"}} for name in PRINTED]
for line in sys.stdin:
    asked = json.loads(line)
    name = asked.get("params", {}).get("name")
    result = {"tools": tools} if name is None else {"content": [{"type": "text", "text": name}]}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": SERVER}
    print(PRINTED.get(name, ""), end="", flush=True)
    if name == "last":
        sys.exit(3)
    if "id" in asked:
        print(json.dumps({"result": result, "id": asked["id"], "jsonrpc": "2.0"}), flush=True)
"""


async def test_what_a_tool_prints_to_stdout_loses_no_answer_and_is_named_when_its_server_dies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "printing.py").write_text(PRINTING, encoding="utf-8")
    entry = {"command": sys.executable, "args": [str(tmp_path / "printing.py")]}
    async with open_tools(config_of(tmp_path, entry, tool_timeout_seconds=20)) as tools:
        for name in ("line", "half", "line"):
            reply = await tools.call(name, {})
            assert (reply.text, reply.error) == (name, False)
        assert (await tools.call("last", {})).error
    (lost,) = (each for each in caplog.records if each.getMessage() == "tool server lost")
    assert "printed to stdout, where MCP messages go: no database" in vars(lost)["why"]


@pytest.mark.parametrize("path", ["", "mcp", "sse"])
async def test_a_result_that_cannot_be_decoded_is_not_waited_for(tmp_path: Path, web: Web, path: str) -> None:
    entry = web.entry(path) if path else stdio()
    async with open_tools(config_of(tmp_path, entry, tool_timeout_seconds=20)) as tools:
        start = time.monotonic()
        for kind in ("depth", "great depth", "broken"):
            reply = await tools.call("raw", {"kind": kind})
            assert reply.error, kind
            assert "raw gave a result that is not valid" in reply.text, reply.text
        for kind in ("utf8", "surrogate"):
            reply = await tools.call("raw", {"kind": kind})
            assert (reply.error, reply.text) == (False, '{"id": 5, "value": "\ufffd"}'), kind
        assert (await tools.call("raw", {"kind": "nan"})).text == '{"id": 5, "value": [null, null, null]}'
        deep: Any = []
        for _ in range(500):
            deep = [deep]
        for value in ("\ud800", deep):
            reply = await tools.call("append", {"text": value})
            assert reply.error
            assert "its arguments cannot be sent" in reply.text
        assert time.monotonic() - start < 10


async def test_fifty_megabytes_are_an_error_that_names_the_limit(tmp_path: Path, web: Web) -> None:
    for entry in (stdio(), web.entry(), web.entry("sse")):
        async with open_tools(config_of(tmp_path, entry)) as tools:
            huge = await tools.call("huge", {"megabytes": 50})
            assert huge.error, entry
            assert len(huge.text) < 1000
            assert (await tools.call("pid", {})).error is False
            small = await tools.call("huge", {"megabytes": 1})
            assert small.text.endswith(f"[cut: {2**20 - 32768} more characters]")


async def test_a_process_that_dies_in_a_call_is_replaced_and_nothing_is_called_twice(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    async with open_tools(config_of(tmp_path, stdio())) as tools:
        before = await pid_of(tools)
        died = await tools.call("note_and_die", {"marker": str(marker)})
        assert died.error
        assert "the tool server misbehaving stopped while it ran; it may have taken effect" in died.text
        assert "its earlier state is lost" in died.text
        assert marker.read_text() == "called\n"
        assert await pid_of(tools) != before
        os.kill(await pid_of(tools), signal.SIGKILL)


async def test_a_process_that_dies_between_calls_is_replaced_and_the_model_is_told(tmp_path: Path) -> None:
    async with open_tools(config_of(tmp_path, stdio())) as tools:
        before = await pid_of(tools)
        os.kill(before, signal.SIGKILL)
        await wait_until_gone(before)
        after = await tools.call("pid", {})
        assert not after.error
        assert after.text.endswith("[the tool server misbehaving was restarted; its earlier state is lost]")


async def test_a_shared_server_that_dies_loses_only_the_calls_in_flight(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    async with ToolPool(config_of(tmp_path, stdio(scope="shared"))) as pool:
        async with pool.session(trajectory(1)) as first, pool.session(trajectory(2)) as second:
            before = await pid_of(first)
            waiting = asyncio.create_task(second.call("wait", {"seconds": 30}))
            await second.call("append", {"text": "sent after the wait"})
            died = await first.call("note_and_die", {"marker": str(marker)})
            assert died.error
            assert (await waiting).error
            pids = await asyncio.gather(*(pid_of(tools) for tools in (first, second, first)))
            assert len(set(pids)) == 1
            assert pids[0] != before
        assert marker.read_text() == "called\n"


async def test_a_read_only_tool_is_called_again_on_the_new_connection(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    async with open_tools(config_of(tmp_path, stdio(scope="shared"))) as tools:
        again = await tools.call("die_once", {"marker": str(marker)})
        assert (again.text, again.error) == ("die_once done", False)
        assert marker.read_text() == "called\n"


async def test_one_reconnect_serves_all_callers_and_then_all_are_told_at_once(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    original = server.McpConnection.open

    async def counted(connection: server.McpConnection) -> None:
        attempts.append(connection)
        await original(connection)

    monkeypatch.setattr(server.McpConnection, "open", counted)
    monkeypatch.setattr(server, "RECONNECT_DELAYS", (0.0, 0.05))
    async with ToolPool(config_of(tmp_path, web.entry())) as pool, pool.session(trajectory()) as tools:
        web.stop()
        attempts.clear()
        failed = await asyncio.gather(*(tools.call("pid", {}) for _ in range(8)), return_exceptions=True)
        failed += await asyncio.gather(*(tools.call("pid", {}) for _ in range(8)), return_exceptions=True)
        assert all(isinstance(error, ToolServerError) for error in failed)
        assert {error.outage for error in failed if isinstance(error, ToolServerError)} == {
            tool_server("misbehaving")
        }
        assert "cannot be reached" in str(failed[0])
        assert len(attempts) == 2
        web.restart()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert (await tools.call("read", {})).text == ""
                    break
                except ToolServerError:
                    await asyncio.sleep(0.1)


async def test_a_restarted_server_without_the_session_is_connected_again(tmp_path: Path, web: Web) -> None:
    async with open_tools(config_of(tmp_path, web.entry())) as tools:
        before = await pid_of(tools)
        web.stop()
        web.restart()
        assert await pid_of(tools) != before


@pytest.mark.parametrize(
    ("path", "problem"),
    [("login", r"asks for a login \(HTTP 401\)"), ("html", "answers text/html instead of MCP")],
)
async def test_a_server_that_admits_nobody_is_named(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    monkeypatch.setattr(server, "RECONNECT_DELAYS", (0.0,))
    with pytest.raises(ToolServerError, match=problem) as failed:
        await ToolPool(config_of(tmp_path, web.entry(path))).open()
    assert failed.value.outage == tool_server("misbehaving")
    assert isinstance(failed.value, ToolServerConfigError) is (path == "login")


async def test_any_other_manager_url_is_a_plain_server_with_the_token(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RECONNECT_DELAYS", (0.0,))
    config = ToolConfig(mcp_manager_url=f"http://127.0.0.1:{web.port}/private", mcp_server_name="search")
    monkeypatch.setenv("MCP_AUTH_TOKEN", "let me in")
    async with open_tools(config) as tools:
        result = await tools.call("read", {})
        assert (result.text, result.server) == ("", "search")
    monkeypatch.setenv("MCP_AUTH_TOKEN", "another token")
    with pytest.raises(ToolServerError, match="asks for a login") as failed:
        await ToolPool(config).open()
    assert "another token" not in str(failed.value)


async def test_a_login_that_expires_and_an_overload_are_outages_not_results(tmp_path: Path, web: Web) -> None:
    async with open_tools(config_of(tmp_path, web.entry("busy"))) as tools:
        with pytest.raises(ToolServerError, match=r"overloaded \(HTTP 429\): slow down") as failed:
            await tools.call("pid", {})
        assert (failed.value.outage, failed.value.retry_after) == (tool_server("misbehaving"), 7.0)
    async with open_tools(config_of(tmp_path, web.entry())) as tools:
        assert (await tools.call("log_out", {})).text == "log_out done"
        with pytest.raises(ToolServerError, match=r"asks for a login \(HTTP 401\): .*Please log in"):
            await tools.call("pid", {})


async def test_a_broken_http_answer_is_that_calls_error_alone(tmp_path: Path, web: Web) -> None:
    async with open_tools(config_of(tmp_path, web.entry("garbage"))) as tools:
        garbage = await tools.call("pid", {})
        assert garbage.error
        assert "Failed to parse JSON response" in garbage.text
    async with open_tools(config_of(tmp_path, web.entry("short"))) as tools:
        short, other = await asyncio.gather(tools.call("wait", {"seconds": 0}), tools.call("pid", {}))
        assert short.error
        assert not other.error
    async with open_tools(config_of(tmp_path, web.entry("sse"))) as tools:
        died, fine = await asyncio.gather(tools.call("die", {}), tools.call("wait", {"seconds": 0.2}))
        assert died.error
        assert (fine.text, fine.error) == ("wait done", False)


async def test_tools_that_change_are_named_to_the_model_and_can_be_called(tmp_path: Path) -> None:
    for scope in ("shared", "trajectory"):
        async with open_tools(config_of(tmp_path, stdio(scope=scope))) as tools:
            names = {schema_name(schema) for schema in await tools.list()}
            assert "clear" in names
            assert "schemaless" in names
            changed = await tools.call("change_tools", {})
            assert "[the tools of this server changed: now also" in changed.text
            assert "The tool extra." in changed.text
            assert "no longer clear" in changed.text
            assert {schema_name(schema) for schema in await tools.list()} == names - {"clear"} | {"extra"}
            assert (await tools.call("extra", {})).text == "extra done"
            never = await tools.call("extras", {})
            assert never.text.startswith("there is no tool named 'extras'; did you mean 'extra'? ")
            gone = await tools.call("clear", {})
            assert (gone.text, gone.error) == (
                "there is no tool clear any more: its server no longer lists it",
                True,
            )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("image", "[image, image/png, 5 bytes; not shown]"),
        ("audio", "[audio, audio/wav, 5 bytes; not shown]"),
        ("link", "[resource, a, file:///a.txt, text/x]"),
        ("embedded", "inside"),
        ("blob", "[resource, file:///a, unknown type, 5 bytes; not shown]"),
        ("unknown", 'seen\n[content of unknown type \'hologram\': {"type": "hologram", "depth": 3}]'),
        ("structured", '{"a": [1, 2]}'),
        ("structured_twice", '{"a": 1}'),
        ("structured_more", 'done\n{"a": 1}'),
        ("wrong", 'bare\n3\n[content of unknown type \'None\': {"text": "no type"}]'),
        ("empty", ""),
    ],
)
async def test_every_content_is_text_or_named(misbehaving_session: ToolSession, kind: str, text: str) -> None:
    result = await misbehaving_session.call("content", {"kind": kind})
    assert (result.text, result.error) == (text, False)


@pytest.fixture
async def misbehaving_session(tmp_path: Path) -> Any:
    async with open_tools(config_of(tmp_path, stdio(scope="shared"))) as tools:
        yield tools


async def test_a_result_without_content_is_an_error_of_the_call(misbehaving_session: ToolSession) -> None:
    result = await misbehaving_session.call("content", {"kind": "none"})
    assert result.error
    assert "content gave a result that is not valid" in result.text
    assert (await misbehaving_session.call("read", {})).error is False


async def test_the_trajectorys_id_travels_in_meta(tmp_path: Path) -> None:
    async with open_tools(config_of(tmp_path, stdio()), trajectory="train/0/t/7") as tools:
        assert '"agentrl/trajectory": "train/0/t/7"' in (await tools.call("meta", {})).text


async def test_the_pool_is_as_large_as_the_concurrency(tmp_path: Path, web: Web) -> None:
    """The server answers when all 160 calls are there; a pool of 100 connections never lets them in."""
    async with open_tools(config_of(tmp_path, web.entry(), max_parallel_tool_calls=256)) as tools:
        calls = (tools.call("barrier", {"calls": 160}) for _ in range(160))
        results = await asyncio.gather(*calls)
        assert [result.text for result in results if result.error] == []
        assert (await tools.call("barrier", {"calls": 1})).text == "161"  # none was called twice


async def test_resources_and_prompts_are_tools_on_request(tmp_path: Path) -> None:
    entry = stdio(resources=True, prompts=True, offer=["list_resources", "read_resource", "get_prompt"])
    async with open_tools(config_of(tmp_path, entry)) as tools:
        names = [schema_name(schema) for schema in await tools.list()]
        assert names == ["get_prompt", "list_resources", "read_resource"]
        listed = (await tools.call("list_resources", {})).text
        assert '"uri": "memo://one"' in listed
        assert '"uriTemplate": "memo://{id}"' in listed
        assert (await tools.call("read_resource", {"uri": "memo://one"})).text == "the memo"
        greeting = await tools.call("get_prompt", {"name": "greet", "arguments": {"who": "Ada"}})
        assert greeting.text == "user: Greet Ada."


async def test_hooks_prepare_and_clear_a_trajectorys_own_process(tmp_path: Path) -> None:
    entry = stdio(
        warm=1,
        setup=[{"tool": "append", "arguments": {"text": "${meta.file} of ${trajectory}"}}],
        teardown=["read"],
        reset="clear",
        offer=["append", "read", "pid"],
    )
    async with ToolPool(config_of(tmp_path, entry)) as pool:
        async with pool.session(trajectory(1, file="a.csv")) as tools:
            first = await pid_of(tools)
            assert (await tools.call("read", {})).text == "a.csv of train/0/t/1"
        async with asyncio.timeout(20), pool.session(trajectory(2, file="b.csv")) as tools:
            assert (await tools.call("read", {})).text == "b.csv of train/0/t/2"
        pids = set()
        for number in range(6):
            async with pool.session(trajectory(number, file="c.csv")) as tools:
                pids.add(await pid_of(tools))
                assert (await tools.call("read", {})).text == f"c.csv of train/0/t/{number}"
        assert len(pids) < 6 or first in pids
        with pytest.raises(ToolServerError, match="needs 'file' of the task's meta"):
            async with pool.session(trajectory(9)):
                pass


async def test_trajectories_at_once_never_see_each_others_state(tmp_path: Path) -> None:
    async def run(number: int) -> str:
        async with pool.session(trajectory(number)) as tools:
            for word in ("one", "two"):
                await tools.call("append", {"text": f"{number}-{word}"})
            return (await tools.call("read", {})).text

    async with ToolPool(config_of(tmp_path, stdio(warm=2))) as pool:
        seen = await asyncio.gather(*(run(number) for number in range(12)))
    assert seen == [f"{number}-one,{number}-two" for number in range(12)]


async def test_limits_bound_concurrency_rate_and_length_of_a_tools_results(tmp_path: Path) -> None:
    limits = {
        "wait": {"concurrency": 2},
        "read": {"calls_per_minute": 600},
        "huge": {"max_result_chars": 9},
    }
    config = config_of(tmp_path, stdio(tools=limits), max_parallel_tool_calls=64)
    async with open_tools(config) as tools:
        await asyncio.gather(*(tools.call("wait", {"seconds": 0.05}) for _ in range(6)))
        assert (await tools.call("peak", {})).text == "2"
        began = time.monotonic()
        await asyncio.gather(*(tools.call("read", {}) for _ in range(65)))
        assert time.monotonic() - began > 0.4
        assert (await tools.call("huge", {"megabytes": 1})).text.startswith("x" * 9 + "\n[cut: ")


async def test_the_calls_of_a_turn_run_in_parallel_up_to_the_flag(tmp_path: Path) -> None:
    async with open_tools(config_of(tmp_path, stdio(), max_parallel_tool_calls=5)) as tools:
        results = await asyncio.gather(*(tools.call("barrier", {"calls": 5}) for _ in range(5)))
        assert not any(result.error for result in results)
    for options, flag in ({"ordered": True}, 8), ({}, 1):
        async with open_tools(config_of(tmp_path, stdio(**options), max_parallel_tool_calls=flag)) as tools:
            await asyncio.gather(*(tools.call("wait", {"seconds": 0.05}) for _ in range(4)))
            assert (await tools.call("peak", {})).text == "1"


async def test_over_http_a_trajectory_may_have_a_session_of_its_own(tmp_path: Path, web: Web) -> None:
    opened = []
    for scope in ("shared", "trajectory"):
        async with ToolPool(config_of(tmp_path, web.entry(scope=scope, warm=0))) as pool:
            counts = []
            for number in range(3):
                async with pool.session(trajectory(number)) as tools:
                    counts.append(int((await tools.call("sessions", {})).text))
            opened.append(counts[-1] - counts[0])
    assert opened == [0, 2]


async def test_a_process_with_an_abandoned_call_serves_no_other_trajectory(tmp_path: Path) -> None:
    entry = stdio(reset="clear", warm=1, tools={"hang": {"timeout_seconds": 0.2}})
    async with ToolPool(config_of(tmp_path, entry)) as pool:
        abandoned = set()
        for number, seconds in enumerate((30, 0.1)):
            async with pool.session(trajectory(number)) as tools:
                abandoned.add(await pid_of(tools))
                call = asyncio.create_task(tools.call("hang", {}))
                await asyncio.wait([call], timeout=seconds)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
        for number in range(3):
            async with pool.session(trajectory(number)) as tools:
                assert await pid_of(tools) not in abandoned
    assert len(abandoned) == 2


async def test_a_process_that_cannot_be_reset_is_replaced(tmp_path: Path) -> None:
    pids = set()
    async with ToolPool(config_of(tmp_path, stdio(reset="die", warm=1))) as pool:
        for number in range(3):
            async with pool.session(trajectory(number)) as tools:
                pids.add(await pid_of(tools))
    assert len(pids) == 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"setup": ["hang"]}, "hang was stopped"),
        ({"setup": [{"tool": "content", "arguments": {"kind": "outage"}}]}, "the index is down"),
    ],
)
@pytest.mark.parametrize("scope", ["trajectory", "shared"])
async def test_a_setup_call_without_an_answer_is_an_outage(
    tmp_path: Path, options: dict[str, Any], problem: str, scope: str
) -> None:
    limits = {"timeout_seconds": 0.3}
    async with ToolPool(config_of(tmp_path, stdio(scope=scope, limits=limits, **options))) as pool:
        with pytest.raises(ToolServerError, match=problem) as failed:
            async with pool.session(trajectory()):
                raise AssertionError("the setup failed")
        assert failed.value.outage == tool_server("misbehaving")


async def test_a_setup_call_that_reports_an_error_is_an_attempt_and_a_teardown_never_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = {"tool": "content", "arguments": {"kind": "none"}}
    async with ToolPool(config_of(tmp_path, stdio(setup=[fails]))) as pool:
        with pytest.raises(ToolServerError, match="reported an error") as failed:
            async with pool.session(trajectory()):
                raise AssertionError("the setup failed")
        assert failed.value.outage is None
    down = {"tool": "content", "arguments": {"kind": "outage"}}
    config = config_of(tmp_path, stdio(scope="shared", teardown=[down]))
    async with ToolPool(config) as pool, pool.session(trajectory()):
        pass
    assert "a teardown call failed" in caplog.text
