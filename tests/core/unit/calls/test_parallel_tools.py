"""A turn calls tools of every state at once; its owner dies between their ends, and the next one goes on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from rollout_fakes import FakeSession, FakeTools
from test_journal import Next, read_again
from trajectories import Trajectory
from waiting import cancel, until

from agentrl.calls import journal
from agentrl.documents.document import now
from agentrl.documents.model_call import DispatchedSamplingTask, ToolExecution
from agentrl.documents.status import StopReason, ToolState
from agentrl.rollout.agent_io import Outcome
from agentrl.tools.tool import Schema, ToolResult, function_schema

STATES = {"look": ToolState.STATELESS, "push": ToolState.REPLAY, "send": ToolState.OUTSIDE}
TURN = {"a": "look", "b": "push", "c": "send", "d": "push"}
"""What the second turn calls at the same time: a text, and the tool that gets it."""
LAST = "z"


def call(name: str, text: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'text': text}})}</tool_call>"


SCRIPT = (
    call("push", "0"),
    "".join(call(name, text) for text, name in TURN.items()),
    call("push", LAST),
    "<answer>3</answer>",
)


class Tools(FakeTools):
    """A tool of each state. Calls of the texts in ``ends`` wait."""

    def __init__(self, *waiting: str) -> None:
        super().__init__()
        self.ends = {text: asyncio.Event() for text in waiting}
        self.begun: list[str] = []
        self.names = list(STATES)

    def list(self, servers: Sequence[str] | None = None) -> Sequence[Schema]:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        return [function_schema(name, f"It {name}s.", parameters) for name in self.names]


class Session(FakeSession):
    """``push`` answers with all that was pushed."""

    tools: Tools

    def __init__(self, tools: FakeTools, servers: Sequence[str] | None) -> None:
        super().__init__(tools, servers)
        self.pushed: list[str] = []

    def state_of(self, name: str, server: str | None = None) -> ToolState:
        return STATES[name]

    async def call(self, name: str, arguments: Mapping[str, str]) -> ToolResult:
        text, started = arguments["text"], time.monotonic()
        self.tools.begun.append(text)
        if text in self.tools.ends:
            await self.tools.ends[text].wait()
        self.tools.calls.append((name, dict(arguments)))
        if name == "push":
            self.pushed.append(text)
        return ToolResult(
            text=",".join(self.pushed) if name == "push" else text, error=False, server="fake",
            seconds=time.monotonic() - started,
        )  # fmt: skip

    async def replay(self, executions: Sequence[ToolExecution]) -> int | None:
        for index, stored in enumerate(executions):
            assert isinstance(stored.arguments, dict)
            if STATES[stored.name] is ToolState.REPLAY:
                made = await self.call(stored.name, stored.arguments)
                if made.text != stored.result:
                    return index
        return None


async def killed(order: str) -> list[DispatchedSamplingTask]:
    """Return the calls of a trajectory killed when the tools of ``order`` had ended, in this order."""
    first = Trajectory(*SCRIPT)
    tools = first.tools = Tools(*TURN, LAST)
    running = asyncio.create_task(first.run())
    await until(lambda: set(TURN) <= set(tools.begun))
    for count, text in enumerate(order):
        await asyncio.sleep(0.02)  # far apart
        tools.ends[text].set()
        await until(lambda: len(tools.calls) == count + 2)  # noqa: B023
    await cancel(running)
    return read_again([turn.document() for turn in first.rollout._calls.made])


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajectories.FakeSession", Session)
    monkeypatch.setattr(journal, "_APART_SECONDS", 0.01)


@pytest.mark.parametrize("order", ["abcd", "bdca", "cdab", "dcba"])
@pytest.mark.parametrize("ended", range(5))
async def test_no_result_of_a_turn_is_lost_or_doubled(order: str, ended: int) -> None:
    before = await killed(order[:ended])
    second = Next(before, *SCRIPT[len(before) :])
    second.tools = Tools()
    assert await second.run() == Outcome(StopReason.ANSWERED, "3")
    assert second.dropped == []
    executions = second.documents[1].tool_executions
    assert [each.name for each in executions] == list(TURN.values()), "each once, in the order of the calls"
    results = {text: each.text for text, each in zip(TURN, executions, strict=True)}
    assert [message["content"] for message in second.rollout.messages if message["role"] == "tool"][1:5] == [
        *results.values()
    ]
    made = [arguments["text"] for _, arguments in second.tools.calls]
    assert made.count("a") == ("a" not in order[:ended])
    assert "c" not in made
    assert (results["c"] == "c") == ("c" in order[:ended])
    assert "c" in order[:ended] or "may have taken effect" in results["c"]
    pushed = [text for text in order[:ended] if text in "bd"]
    pushed += [text for text in "bd" if text not in pushed]
    assert results[pushed[-1]] == ",".join(["0", *pushed])
    assert second.documents[2].tool_executions[0].text == ",".join(["0", *pushed, LAST])


async def test_a_third_owner_has_the_results_of_both_in_the_order_in_which_they_came() -> None:
    second = Next(await killed("d"), *SCRIPT[2:])
    await asyncio.sleep(0.02)
    tools = second.tools = Tools(LAST)
    running = asyncio.create_task(second.run())
    await until(lambda: LAST in tools.begun)
    await cancel(running)
    third = Next(read_again(second.documents), *SCRIPT[3:])
    third.tools = Tools()
    assert await third.run() == Outcome(StopReason.ANSWERED, "3")
    assert third.documents[2].tool_executions[0].text == f"0,d,b,{LAST}"


class Growing(Session):
    """It has the tool ``send`` once ``push`` was called."""

    async def list(self) -> Sequence[Schema]:
        self.tools.names = list(STATES) if self.pushed else ["look", "push"]
        return self.tools.list()


@pytest.mark.parametrize("known", [1, 2, 3])
@pytest.mark.parametrize("has_results", [True, False])
async def test_a_tool_that_an_earlier_call_has_added_is_known_to_a_session_that_begins(
    known: int, has_results: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (call("push", "0"), call("send", "a"), call("push", LAST), SCRIPT[-1])
    monkeypatch.setattr("trajectories.FakeSession", Growing)
    first = Trajectory(*script)
    first.tools = Tools()
    first.tools.names.remove("send")
    await first.run()
    assert [len(each.tool_executions) for each in first.calls] == [1, 1, 1, 0]
    before = first.calls[:known]
    if not has_results:
        before[-1] = replace(before[-1], tool_executions=())
    second = Next(before, *script[known:])
    second.tools = Tools()
    second.tools.names.remove("send")
    assert await second.run() == Outcome(StopReason.ANSWERED, "3")
    assert second.dropped == []
    assert second.rollout.messages == first.rollout.messages


def test_calls_that_ended_at_about_the_same_time_are_made_again_in_the_order_of_the_answer() -> None:
    def run(seconds: float, attempt: int = 1) -> ToolExecution:
        return ToolExecution(
            name="push", arguments={}, result="", error=False, seconds=seconds, started_at=now(),
            attempt=attempt,
        )  # fmt: skip

    slow, near, fast, later = run(2.0), run(1.995), run(1.0), run(0.1, attempt=2)
    found = Next([]).journal
    assert found is not None
    found.count([later, slow, near, fast])
    assert found.done == [fast, slow, near, later]
