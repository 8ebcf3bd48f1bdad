"""Python functions and classes as tools: schemas, state, results and errors."""

from __future__ import annotations

import asyncio
import time
from contextvars import copy_context
from typing import Annotated, Any

import pytest
from open_tools import open_tools
from pydantic import Field
from waiting import cancel

from agentrl.base.user_code import allow
from agentrl.config.schema import ToolConfig
from agentrl.errors import ConfigError, ScorerError, ToolServerError
from agentrl.tools.pool import ToolPool
from agentrl.tools.python import Toolset, tool
from agentrl.tools.tool import TrajectoryInfo

ANY = TrajectoryInfo(id="train/0/t/0")


@tool("adder")
async def add(a: int, b: Annotated[float, Field(description="the second summand")] = 2.0) -> float:
    """Return a + b."""
    return a + b


@tool()
class Notes:
    """Notes of one trajectory."""

    closed: list[list[str]] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def write(self, line: str) -> None:
        """Write a line."""
        self.lines.append(line)

    def read(self) -> dict[str, Any]:
        """Read every line."""
        return {"lines": self.lines}

    def close(self) -> None:
        self.closed.append(self.lines)
        raise ValueError("it is logged")


@tool()
def fails(how: str) -> str:
    """Fail as told."""
    match how:
        case "exit":
            raise SystemExit(3)
        case "server":
            raise ScorerError("the judge is away")
        case "slow":
            time.sleep(0.5)
    raise ValueError(how)


@tool()
def measure() -> dict[str, float]:
    """Return numbers that JSON cannot hold."""
    return {"a": float("nan"), "b": float("-inf"), "c": 1.5}


@tool()
class Broken:
    """Cannot be instantiated."""

    def __init__(self) -> None:
        raise OSError("no display")

    async def look(self) -> str:
        """Look."""
        return ""


def names(*own: str) -> ToolConfig:
    return ToolConfig(tools=",".join(own), tool_timeout_seconds=0.2)


def path(name: str) -> str:
    return f"{__name__}:{name}"


async def test_a_function_is_a_tool_with_a_schema_from_its_hints() -> None:
    async with ToolPool(names("adder")) as pool, pool.session(ANY) as tools:
        assert pool.servers == ("adder",)
        (schema,) = await tools.list()
        b = {"type": "number", "default": 2.0, "description": "the second summand"}
        assert schema["function"] == {
            "name": "add", "description": "Return a + b.",
            "parameters": {
                "type": "object", "additionalProperties": False, "required": ["a"],
                "properties": {"a": {"type": "integer"}, "b": b},
            },
        }  # fmt: skip
        result = await tools.call("add", {"a": 1})
        assert (result.text, result.error, result.server) == ("3.0", False, "adder")


async def test_each_trajectory_has_an_instance_of_a_class() -> None:
    Notes.closed.clear()
    async with ToolPool(names(path("Notes"))) as pool:
        assert [schema["function"]["name"] for schema in pool.list(["Notes"])] == ["read", "write"]
        async with pool.session(ANY) as first, pool.session(ANY) as second, pool.session(ANY):
            assert (await first.call("write", {"line": "one"})).text == ""
            assert (await first.call("read", {})).text == '{"lines":["one"]}'
            assert (await second.call("read", {})).text == '{"lines":[]}'
        assert sorted(Notes.closed) == [[], ["one"]]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "tool fails raised SystemExit: 3"),
        ("wrong", "tool fails raised ValueError: wrong"),
        ("slow", "fails was stopped: it did not answer within 0.2 s"),
    ],
)
async def test_what_a_tool_raises_is_a_result_that_the_model_reads(how: str, text: str) -> None:
    async with open_tools(names(path("fails"))) as tools:
        result = await tools.call("fails", {"how": how})
        assert (result.text, result.error) == (text, True)


async def test_numbers_that_are_not_finite_are_null() -> None:
    async with open_tools(names(path("measure"))) as tools:
        assert (await tools.call("measure", {})).text == '{"a":null,"b":null,"c":1.5}'


async def test_a_failure_of_the_tools_own_services_ends_the_trajectory() -> None:
    async with open_tools(names(path("fails"), path("Broken"))) as tools:
        with pytest.raises(ScorerError, match="the judge is away"):
            await tools.call("fails", {"how": "server"})
        with pytest.raises(ToolServerError, match="the class of tool Broken raised OSError: no display"):
            await tools.call("look", {})


async def test_cancelling_a_trajectory_cancels_its_call() -> None:
    async with open_tools(names(path("fails"))) as tools:
        call = asyncio.create_task(tools.call("fails", {"how": "slow"}))
        await asyncio.sleep(0.05)
        await cancel(call)


def test_what_cannot_be_a_tool_is_refused() -> None:
    def undocumented(a: int) -> None: ...

    def untyped(a) -> None:  # type: ignore[no-untyped-def]
        """Has no hint."""

    def many(*a: int) -> None:
        """Takes any number."""

    class Empty: ...

    for target, problem in [
        (undocumented, "undocumented has no docstring"),
        (untyped, "the parameter 'a' of untyped has no type hint"),
        (many, "the parameter 'a' of many cannot be given by name"),
        (Empty, "the class Empty has no public method"),
        (3, "of type int"),
    ]:
        with pytest.raises(TypeError, match=problem):
            Toolset.of(target)


def test_a_tool_is_imported_only_where_that_is_allowed() -> None:
    def use() -> None:
        allow({"json"})
        with pytest.raises(ConfigError, match="may not import"):
            ToolPool(names("os:getcwd"))

    copy_context().run(use)
