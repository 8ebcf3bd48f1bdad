"""Run the tool calls of one turn: in parallel, in the order of the calls, with tools added meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from agentrl.calls.turns import Tools, Turn, call_id_of, execute, message_of, run_tool_calls
from agentrl.chat.parsers.parser import ParsedMessage, ToolCall
from agentrl.documents.model_call import ToolExecution
from agentrl.errors import ToolServerError
from agentrl.tools.tool import Schema, ToolResult, function_schema

OLD = [function_schema(name, f"The tool {name}.", None) for name in ("first", "second", "lost")]
NEW = function_schema("added", "Added since.", None)


class Together:
    """Every call waits until ``expected`` calls wait."""

    def __init__(self, expected: int) -> None:
        self.barrier = asyncio.Barrier(expected)
        self.ended: list[str] = []

    async def list(self) -> Sequence[Schema]:
        return [*OLD, NEW]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        async with asyncio.timeout(10):
            await self.barrier.wait()
        if name == "lost":
            raise ToolServerError("the server is away")
        if name == "first":
            await asyncio.sleep(0.02)
        self.ended.append(name)
        return ToolResult(text=f"{name} said", error=False, seconds=0.0, server="s")


async def run(tools: Together, *names: str) -> tuple[list[Any], Any]:
    turn = SimpleNamespace(
        tool_calls=tuple(ToolCall(name, {}) for name in names),
        error=None,
        response={"tool_calls": [{"id": f"call{place}"} for place in range(len(names))]},
        executions=[],
        refuse=lambda problem: f"Error: {problem}",
        has_run=lambda call: False,
    )

    async def run_one(call: ToolCall) -> ToolExecution:
        execution = await execute(call, cast(Tools, tools))
        turn.executions.append(execution)
        return execution

    try:
        return await run_tool_calls(cast(Turn, turn), OLD, tools.list, run_one), turn
    except ToolServerError as error:
        return [error], turn


async def test_the_calls_of_a_turn_run_in_parallel_and_their_results_keep_the_order() -> None:
    tools = Together(2)
    messages, turn = await run(tools, "first", "unknown", "second")
    assert tools.ended == ["second", "first"]
    assert [execution.name for execution in turn.executions] == ["first", "second"]
    contents = [(message["tool_call_id"], message["content"]) for message in messages]
    assert contents[0] == ("call0", "first said")
    assert contents[1][1].startswith("Error: ")
    assert contents[2] == ("call2", "second said")


async def test_a_lost_server_ends_the_turn_and_the_other_calls_are_recorded() -> None:
    (error,), turn = await run(Together(2), "lost", "second")
    assert isinstance(error, ToolServerError)
    assert [execution.name for execution in turn.executions] == ["second"]


async def test_a_tool_that_a_server_added_since_the_prompt_can_be_called() -> None:
    messages, _ = await run(Together(1), "added")
    assert messages[0]["content"] == "added said"


def test_each_tool_call_of_a_long_trajectory_has_an_id_of_its_own() -> None:
    one = ParsedMessage("", (ToolCall("first", {}),))
    many = ParsedMessage("", (ToolCall("first", {}),) * 3000)
    turns = [message_of(one, call_id_of(turn)) for turn in range(12_000)]
    ids = [call["id"] for message in (*turns[:-1], message_of(many, call_id_of(11_999)))
           for call in message["tool_calls"]]  # fmt: skip
    assert len(set(ids)) == 11_999 + 3000
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
    assert [ids[0], ids[999], ids[1000]] == ["call00000", "call99900", "c00100000"]
