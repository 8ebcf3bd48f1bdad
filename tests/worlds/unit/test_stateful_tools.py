"""Tools with verl's methods: their state, their rewards, and the configuration file that names them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from agentrl.config.schema import ToolConfig
from agentrl.errors import ConfigError, FailureError, OutageError, ToolServerError, tool_server
from agentrl.tools.config import StdioSpec
from agentrl.tools.pool import ToolPool, load_tools
from agentrl.tools.python import StatefulTool, StatefulTools
from agentrl.tools.tool import TrajectoryInfo, function_schema

DIGITS = {"answer": {"type": "string", "description": "digits"}}
PARAMETERS = {"type": "object", "properties": DIGITS, "required": ["answer"]}
SCHEMA = function_schema("submit", "Submits an answer.", PARAMETERS)


class Submit:
    """A tool as verl's own example writes it: no base class of ours."""

    alive: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.name = tool_schema.function.name

    async def create(self, instance_id: Any = None, ground_truth: str | None = None, **kwargs: Any) -> Any:
        assert instance_id is not None
        self.alive[instance_id] = {"truth": ground_truth, "whole": kwargs["create_kwargs"], "reward": 0.0}
        return instance_id, SimpleNamespace(text=None, image=None, video=None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        answer = parameters["answer"]
        if answer == "crash":
            raise ValueError("no such answer")
        if answer == "slow":
            await asyncio.sleep(60)
        right = answer == self.alive[instance_id]["truth"]
        self.alive[instance_id]["reward"] = float(right)
        response = SimpleNamespace(text=f"right: {right}", image=[b"png"] if right else None, video=None)
        return response, 0.0 if right else -0.05, {"seen": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.alive[instance_id]["reward"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.alive[instance_id]


class Failing(StatefulTool):
    """A tool whose hooks fail as its configuration says."""

    def get_openai_tool_schema(self) -> Mapping[str, Any]:
        return {"type": "function", "function": {"name": "failing"}}

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        if self.config.get("create"):
            raise OSError("no room")
        return instance_id

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        return {"rows": [1, 2]}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        raise OSError("it is logged")


def _trajectory(name: str = "r1", **meta: Any) -> TrajectoryInfo:
    return TrajectoryInfo(id=name, meta=meta)


def _write(path: Path, *entries: Mapping[str, Any]) -> str:
    path.write_text(json.dumps({"tools": list(entries)}))
    return str(path)


def _submit(**more: Any) -> dict[str, Any]:
    return {"class_name": f"{__name__}.Submit", "config": {"type": "native"}, "tool_schema": SCHEMA, **more}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr(Submit, "alive", {})


VERL = """\
tools:
  - class_name: "{name}.Submit"
    config: {{}}
    tool_schema:
      type: "function"
      function:
        name: "submit"
        description: "Submits an answer."
        parameters:
          type: "object"
          properties:
            answer: {{type: "string", description: "digits"}}
          required: ["answer"]
"""


async def test_verls_configuration_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(VERL.format(name=__name__))
    async with ToolPool(ToolConfig(tool_config_path=str(path))) as pool:
        assert pool.list() == [SCHEMA]
        meta = {"extra_info": {"tools_kwargs": {"submit": {"create_kwargs": {"ground_truth": "7"}}}}}
        async with pool.session(_trajectory(**meta)) as tools:
            wrong = await tools.call("submit", {"answer": "8"})
            right = await tools.call("submit", {"answer": "7"})
            assert (wrong.text, wrong.reward) == ("right: False", -0.05)
            assert (right.text, right.reward) == ("right: True\n[image that cannot be shown]", 0.0)
            assert Submit.alive["r1"]["whole"] == {"ground_truth": "7"}
            assert await tools.rewards() == {"submit": {"calls": [-0.05, 0.0], "state": 1.0}}
        assert Submit.alive == {}


async def test_each_trajectory_has_its_own_state_and_a_failed_call_is_a_result(tmp_path: Path) -> None:
    path = _write(tmp_path / "tools.yaml", _submit())
    config = ToolConfig(tool_config_path=path, tool_timeout_seconds=0.2)
    async with ToolPool(config) as pool:
        answers = {"a": {"ground_truth": "1"}, "b": {"ground_truth": "2"}}
        one, two = (
            pool.session(_trajectory(name, tools_kwargs={"submit": {"create_kwargs": answer}}))
            for name, answer in answers.items()
        )
        async with one, two:
            assert (await one.call("submit", {"answer": "1"})).reward == 0.0
            assert (await two.call("submit", {"answer": "1"})).reward == -0.05
            crash = await one.call("submit", {"answer": "crash"})
            slow = await two.call("submit", {"answer": "slow"})
        assert (crash.error, "no such answer" in crash.text) == (True, True)
        assert (slow.error, "0.2 s" in slow.text) == (True, True)


async def test_a_failing_create_ends_the_attempt_and_a_failing_release_is_logged() -> None:
    good = StatefulTools.load(Failing, {}, None, where="tools[0]", call_timeout=5)
    session = good.session(_trajectory())
    await session.open()
    assert (await session.call("failing", {})).text == '{"rows":[1,2]}'
    assert await session.reward() is None
    await session.close()
    bad = StatefulTools.load(Failing, {"create": True}, None, where="tools[0]", call_timeout=5)
    with pytest.raises(ToolServerError, match="create of tool failing raised OSError: no room"):
        await bad.session(_trajectory()).open()


async def test_a_class_with_verls_methods_can_be_named_by_the_tools_flag() -> None:
    async with ToolPool(ToolConfig(tools=f"{__name__}:Failing,python_sandbox")) as pool:
        assert pool.servers == ("failing", "code_interpreter")


SANDBOX = "agentrl.worlds.sandbox.tool.PythonSandbox"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"config": {}}, "has no class_name"),
        ({"class_name": "verl.tools.gsm8k_tool.Gsm8kTool"}, "cannot be imported"),
        ({"class_name": "json.JSONDecoder"}, "has no method 'execute'"),
        (
            {"class_name": f"{__name__}.Submit", "tool_schema": {"type": "function"}},
            "'tool_schema.function' is missing",
        ),
        ({"class_name": f"{__name__}.Submit"}, "raised AttributeError"),
        ({"class_name": "x.y", "config": {"type": "other"}}, "config.type is 'other'"),
        ({"class_name": "x.y", "config": [1]}, "must be a mapping"),
        ({"config": {"type": "mcp"}}, "has no mcp_servers_config_path"),
        ({"class_name": SANDBOX, "config": {"memory_mb": "lots"}}, "memory_mb is 'lots'"),
    ],
)
def test_a_malformed_entry_names_its_place(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    path = _write(tmp_path / "tools.yaml", _submit(), entry)
    with pytest.raises(ConfigError) as caught:
        load_tools(path, call_timeout=1)
    assert message in str(caught.value)
    assert caught.value.hint


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("tools: 3", "[", "other: []"):
        path = tmp_path / "tools.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"tools\.yaml"):
            load_tools(str(path), call_timeout=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tools(str(tmp_path / "none.yaml"), call_timeout=1)


def test_mcp_entries_name_servers_and_the_tools_to_offer(tmp_path: Path) -> None:
    servers = tmp_path / "mcp.yml"
    servers.write_text("servers: {search: {command: python, args: [-m, search]}}")
    mcp = {"mcp_servers_config_path": str(servers), "tool_selected_list": ["find"]}
    path = _write(tmp_path / "tools.yaml", {"class_name": "verl.X", "config": {"type": "mcp"}, "mcp": mcp})
    found = load_tools(path, call_timeout=1)
    (server,) = found.servers
    assert isinstance(server, StdioSpec)
    assert (server.name, server.options.offer) == ("search", ("find",))


class Reaching(StatefulTool):
    """A tool that reaches a service; ``error`` is what that raises."""

    error: ClassVar[Exception | None] = None

    def get_openai_tool_schema(self) -> Any:
        return {"type": "function", "function": {"name": "reaching", "description": "Reaches."}}

    def reach(self) -> None:
        if self.error is not None:
            raise self.error

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        self.reach()
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.reach()
        return "reached"

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        self.reach()
        return 1.0


def _wrapped(cause: Exception) -> Exception:
    """An HTTP client's error, as it wraps one of the socket."""
    error = RuntimeError("the request failed")
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_outage"),
    [
        (ConnectionRefusedError("refused"), True),
        (TimeoutError("late"), True),
        (_wrapped(ConnectionResetError("reset")), True),
        (OutageError("the index is down"), True),
        (ValueError("no such file"), False),
    ],
)
async def test_an_outage_of_what_a_tool_reaches_is_told_from_its_errors(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_outage: bool
) -> None:
    outage = tool_server("reaching") if is_outage else None
    async with ToolPool(ToolConfig(tools=f"{__name__}:Reaching")) as pool:
        async with pool.session(_trajectory()) as tools:
            monkeypatch.setattr(Reaching, "error", error)
            with pytest.raises(FailureError) as failed:
                await tools.rewards()
            assert failed.value.outage == outage
            if isinstance(error, OutageError):
                with pytest.raises(OutageError, match="the index is down"):
                    await tools.call("reaching", {})
            else:
                assert (await tools.call("reaching", {})).error
        if isinstance(error, OutageError):
            error.outage = None
        with pytest.raises(FailureError) as failed:
            async with pool.session(_trajectory()):
                raise AssertionError("create failed")
        assert failed.value.outage == outage


async def test_a_create_that_takes_too_long_is_an_outage() -> None:
    class Slow(Reaching):
        async def create(self, instance_id: str, **kwargs: Any) -> str:
            await asyncio.sleep(60)
            return instance_id

    slow = StatefulTools.load(Slow, {}, None, where="tools[0]", call_timeout=0.05)
    with pytest.raises(ToolServerError, match=r"longer than 0\.05 s") as failed:
        await slow.session(_trajectory()).open()
    assert failed.value.outage == tool_server("reaching")
