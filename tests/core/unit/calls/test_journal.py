"""An agent that runs again gets what it has done from the journal, and goes on with what it has not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import bson
import pytest
import rollout_fakes
from bson.codec_options import CodecOptions
from rollout_fakes import FakeSession
from trajectories import ADD, ANSWER, Trajectory

from agentrl.calls import journal as journal_module
from agentrl.calls.journal import Journal
from agentrl.documents.document import now
from agentrl.documents.model_call import STEP, DispatchedSamplingTask, Event, ToolExecution, full_messages
from agentrl.documents.status import StopReason, ToolState
from agentrl.errors import ReplayError, ToolServerError, TrajectoryError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import Agent
from agentrl.rollout.rollout import Role, Rollout

SCRIPT = (ADD, "no tool", ADD, ADD, ANSWER)
VOLATILE = ("created_at", "generate_seconds", "tool_seconds", "checksums", "revision")


def shown(calls: Sequence[DispatchedSamplingTask]) -> list[dict[str, Any]]:
    """The documents of calls, without times."""
    documents = [call.to_document() for call in calls]
    for document in documents:
        for execution in document["tool_executions"]:
            execution.pop("started_at")
        for event in document["events"]:
            event |= {"started_at": None, "seconds": 0.0}
    return [{key: value for key, value in each.items() if key not in VOLATILE} for each in documents]


class Next(Trajectory):
    """A trajectory that goes on with the calls of another; ``dropped`` has what it left of them."""

    def __init__(self, before: Sequence[DispatchedSamplingTask], *script: Any, **flags: Any) -> None:
        super().__init__(*script, **flags)
        self.dropped: list[int] = []
        self.noted: list[tuple[int, int]] = []
        self.journal = Journal(before, self._drop, self._note)

    async def _drop(self, first: int) -> None:
        self.dropped.append(first)

    async def _note(self, journal: Journal) -> None:
        self.noted.append((journal.replayed, journal.tokens))

    @property
    def documents(self) -> list[DispatchedSamplingTask]:
        """What is stored of it: a call that only came back is not written again."""
        return [turn.document() for turn in self.rollout._calls.made]


@pytest.mark.parametrize("known", range(len(SCRIPT) + 1))
@pytest.mark.parametrize("has_tools", [True, False])
async def test_a_trajectory_goes_on_after_each_of_its_calls(known: int, has_tools: bool) -> None:
    first = Trajectory(*SCRIPT)
    await first.run()
    before = list(first.calls[:known])
    if before and not has_tools:  # its owner died while the tool ran
        before[-1] = replace(before[-1], tool_executions=())
    second = Next(before, *SCRIPT[known:], "never")
    outcome = await second.run()
    assert outcome == Outcome(StopReason.ANSWERED, "3")
    assert len(second.engine.prompts) == len(SCRIPT) - known
    made = sum(len(call.tool_executions) for call in before)
    assert len(second.tools.calls) == 3 - made
    assert second.rollout.tool_calls == 3
    assert [call.to_document()["output_ids"] for call in second.documents] == [
        call.output_ids for call in first.calls
    ]
    assert second.dropped == []
    assert second.noted == ([(known, sum(call.generated_tokens for call in before))] if known else [])
    assert shown(second.documents) == shown(first.calls)


async def test_the_heartbeats_go_on_while_a_long_trajectory_comes_back() -> None:
    """Else its owner would lose all its leases, and the next one too: their deaths would be poison."""
    turns, beats = 20, 0
    first = Trajectory(*[ADD] * turns, ANSWER, max_turns=turns + 1)
    await first.run()
    second = Next(first.calls[:turns], ANSWER, max_turns=turns + 1)

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    beating = asyncio.create_task(beat())
    await second.run()
    beating.cancel()
    assert beats >= turns
    assert len(second.engine.prompts) == 1


async def test_a_call_that_differs_is_live_and_the_rest_is_dropped() -> None:
    first = Trajectory(*SCRIPT)
    await first.run()

    async def other(rollout: Rollout) -> Outcome:
        turn = await rollout.generate()
        await rollout.call_tools(turn)
        rollout.append_messages([{"role": "user", "content": "and?"}])
        turn = await rollout.generate()
        return Outcome(StopReason.ANSWERED, turn.answer or "")

    second = Next(first.calls, ANSWER)
    assert (await second.run(other)).final_answer == "3"
    assert second.dropped == [1]
    assert len(second.engine.prompts) == 1
    assert second.documents[0].output_ids == first.calls[0].output_ids
    assert second.documents[1].parent == second.documents[0].id
    assert second.noted == [(1, first.calls[0].generated_tokens)]


async def test_an_agent_that_ends_earlier_drops_the_rest() -> None:
    first = Trajectory(*SCRIPT)
    await first.run()

    async def once(rollout: Rollout) -> Outcome:
        await rollout.generate()
        return Outcome(StopReason.TURNS_LIMIT)

    second = Next(first.calls, "never")
    await second.run(once)
    assert (second.dropped, second.engine.prompts) == ([1], [])


def talk(order: Sequence[str]) -> Agent:
    async def agent(rollout: Rollout) -> Outcome:
        async def speak(role: Role) -> None:
            for _ in range(3):
                turn = await role.generate()
                await role.call_tools(turn)

        await asyncio.gather(*(speak(rollout.role(name)) for name in order))
        return Outcome(StopReason.ANSWERED, "3")

    return agent


@pytest.mark.parametrize("known", [2, 5])
async def test_parallel_roles_may_ask_in_another_order(known: int) -> None:
    first = Trajectory(*[ADD] * 6)
    await first.run(talk("ab"))
    second = Next(first.calls[:known], *[ADD] * (6 - known))
    await second.run(talk("ba"))
    assert second.dropped == []
    assert [call.index for call in second.documents] == list(range(6))
    assert [call.role for call in second.documents[:known]] == [call.role for call in first.calls[:known]]
    assert len(second.tools.calls) == 6 - known


async def test_a_role_that_never_comes_back_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_STALLED_SECONDS", 0.05)
    first = Trajectory(*[ADD] * 6)
    await first.run(talk("ab"))
    second = Next(first.calls, *[ADD] * 6)
    await second.run(talk("b"))
    assert second.dropped == [0]
    assert [call.role for call in second.documents] == ["b"] * 3


async def test_a_call_does_not_come_back_while_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_STALLED_SECONDS", 0.01)
    first = Trajectory(*[ADD] * 6)
    await first.run(talk("ab"))
    second = Next(first.calls, *[ADD] * 3)
    dropping, dropped = asyncio.Event(), asyncio.Event()

    async def drop(first: int) -> None:
        dropping.set()
        await dropped.wait()
        second.dropped.append(first)

    async def agent(rollout: Rollout) -> Outcome:
        early = asyncio.create_task(rollout.role("b").generate())
        await dropping.wait()
        late = asyncio.create_task(rollout.role("a").generate())
        await asyncio.sleep(0.05)
        dropped.set()
        await asyncio.gather(early, late)
        return Outcome(StopReason.ANSWERED, "3")

    monkeypatch.setattr(second.journal, "_drop", drop)
    await second.run(agent)
    assert second.dropped == [0]
    assert [turn.stored for turn in second.rollout._calls.made] == [None, None]
    assert len(second.engine.prompts) == 2


async def test_once_has_the_value_of_the_first_time() -> None:
    asked: list[str] = []

    async def agent(rollout: Rollout) -> Outcome:
        def ask(name: str) -> list[str]:
            asked.append(name)
            return [name, str(len(asked))]

        async def later() -> Any:
            return ask("later")

        found = [await rollout.once("early", lambda: ask("early"))]
        for _ in range(2):
            await rollout.generate()
            found.append(await rollout.once("late", later))
        return Outcome(StopReason.ANSWERED, str(found))

    first = Trajectory("a", "b")
    answer = (await first.run(agent)).final_answer
    assert answer == "[['early', '1'], ['later', '2'], ['later', '3']]"
    assert [[event.name for event in call.events] for call in first.calls] == [["early", "late"], ["late"]]
    second = Next(first.calls, "never")
    assert (await second.run(agent)).final_answer == answer
    assert len(asked) == 3
    third = Next(first.calls[:1], "b")
    assert (await third.run(agent)).final_answer == answer.replace("3", "4")


async def test_a_value_that_came_back_stays_with_the_call_that_is_made_instead() -> None:
    days = iter(["Monday", "Tuesday"])
    said = "hello"

    async def agent(rollout: Rollout) -> Outcome:
        today = await rollout.once("today", lambda: next(days))
        rollout.append_messages([{"role": "user", "content": f"{said}, it is {today}"}])
        await rollout.generate()
        return Outcome(StopReason.ANSWERED, today)

    first = Trajectory("a")
    await first.run(agent)
    said = "good day"
    second = Next(first.calls, "b")
    assert (await second.run(agent)).final_answer == "Monday"
    assert second.dropped == [0]
    third = Next(second.documents, "never")
    assert (await third.run(agent)).final_answer == "Monday"
    assert third.dropped == []


async def test_a_slow_function_does_not_hold_the_event_loop() -> None:
    going = threading.Event()

    async def agent(rollout: Rollout) -> Outcome:
        rollout.loop.call_later(0.01, going.set)
        return Outcome(StopReason.ANSWERED, str(await rollout.once("slow", lambda: going.wait(10))))

    assert (await Trajectory("a").run(agent)).final_answer == "True"


@pytest.mark.parametrize("value", [b"x" * 2**21, ["y" * 2**20]])
async def test_once_keeps_no_large_value(value: Any) -> None:
    async def agent(rollout: Rollout) -> Outcome:
        await rollout.once("large", lambda: value)
        raise AssertionError

    with pytest.raises(TrajectoryError, match="more than 1,048,576"):
        await Trajectory("a").run(agent)


async def test_a_call_with_effects_is_never_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "state_of", lambda *_: ToolState.OUTSIDE)
    first = Trajectory(ADD, ANSWER)
    await first.run()
    (execution,) = first.calls[0].tool_executions
    assert execution.finished
    cut = replace(first.calls[0], tool_executions=(replace(execution, finished=False, result=""),))
    second = Next([cut], ANSWER)
    await second.run()
    assert second.tools.calls == []
    (told,) = second.documents[0].tool_executions
    assert (told.error, told.finished) == (True, False)
    assert "may have taken effect" in second.rollout.messages[2]["content"]
    third = Next(second.documents[:1], ANSWER)
    await third.run()
    assert third.rollout.messages == second.rollout.messages


async def test_it_is_stored_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "state_of", lambda *_: ToolState.OUTSIDE)
    trajectory = Trajectory(ADD, ANSWER)
    stored: list[list[bool]] = []

    async def flush(_: object) -> None:
        stored.append([each.finished for turn in trajectory.rollout._calls.made for each in turn.executions])

    async def call(name: str, arguments: Any) -> Any:
        assert stored == [[False]]
        return await type(trajectory.tools).call(trajectory.tools, name, arguments)

    monkeypatch.setattr("rollout_fakes._Writes.flush", flush)
    trajectory.tools.call = call  # type: ignore[method-assign]
    await trajectory.run()
    assert [each.finished for each in trajectory.calls[0].tool_executions] == [True]


async def test_a_turn_is_written_again_only_if_something_came() -> None:
    first = Trajectory(*SCRIPT)
    await first.run()
    second = Next(first.calls[:3], *SCRIPT[3:])
    await second.run()
    assert [turn.is_written for turn in second.pending] == [True] * 3 + [False] * 2


BOTH = ADD + '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 2}}</tool_call>'
QUESTION = {"role": "user", "content": "q"}


async def framework(rollout: Rollout) -> Outcome:
    """Sends whole conversations, and runs the tool calls of an answer at the same time."""
    message, _ = await rollout.complete([QUESTION], rollout.schemas)
    calls = message["tool_calls"]
    results = await asyncio.gather(
        *(rollout.call_tool(call["id"], "add", call["function"]["arguments"]) for call in calls)
    )
    tools = [
        {"role": "tool", "content": text, "tool_call_id": call["id"]}
        for call, (text, _) in zip(calls, results, strict=True)
    ]
    await rollout.complete([QUESTION, message, *tools], rollout.schemas)
    return Outcome(StopReason.ANSWERED, "3")


async def test_results_that_come_back_in_another_order_stay_with_their_calls() -> None:
    first = Trajectory(BOTH, ANSWER)
    call = first.tools.call

    async def called(name: str, arguments: Any) -> Any:
        if arguments["a"] == 1:
            await asyncio.sleep(0.01)
        return await call(name, arguments)

    first.tools.call = called  # type: ignore[method-assign]
    await first.run(framework)
    assert [each.result for each in first.calls[0].tool_executions] == ["7", "3"]
    second = Next(first.calls[:1], ANSWER)
    await second.run(framework)
    assert second.tools.calls == []
    is_written_again = not second.rollout._calls.made[0].is_written
    read = full_messages(second.documents[1], second.documents[0] if is_written_again else first.calls[0])
    assert [message["content"] for message in read] == ["3", "7"]


async def test_a_tool_that_ends_after_its_call_was_closed_leaves_it_as_it_is_stored() -> None:
    trajectory = Trajectory(ADD, ANSWER)
    going = asyncio.Event()
    call = trajectory.tools.call

    async def late(name: str, arguments: Any) -> Any:
        await going.wait()
        return await call(name, arguments)

    async def agent(rollout: Rollout) -> Outcome:
        message, turn = await rollout.complete([QUESTION], rollout.schemas)
        of_tool = message["tool_calls"][0]
        running = asyncio.create_task(
            rollout.call_tool(of_tool["id"], "add", of_tool["function"]["arguments"])
        )
        await asyncio.sleep(0)
        told = {"role": "tool", "content": "it still runs", "tool_call_id": of_tool["id"]}
        await rollout.complete([QUESTION, message, told], rollout.schemas)
        turn.wrote(turn.document(), turn.changes)
        going.set()
        assert await running == ("3", False)
        assert turn.is_written
        assert turn.executions == []
        return Outcome(StopReason.ANSWERED, "3")

    trajectory.tools.call = late  # type: ignore[method-assign]
    await trajectory.run(agent)


async def calls_tools_apart(rollout: Rollout) -> Outcome:
    """Runs a tool by its own code, and one of an answer whose conversation has gone on."""
    message, _ = await rollout.complete([QUESTION], rollout.schemas)
    of_tool = message["tool_calls"][0]
    told = {"role": "tool", "content": "it is late", "tool_call_id": of_tool["id"]}
    found = [await rollout.call_tool("", "add", {"a": number, "b": 2}) for number in (5, 6)]
    await rollout.complete([QUESTION, message, told], rollout.schemas)
    found.append(await rollout.call_tool(of_tool["id"], "add", of_tool["function"]["arguments"]))
    return Outcome(StopReason.ANSWERED, str([text for text, _ in found]))


@pytest.mark.parametrize("known", [0, 1, 2])
async def test_tool_runs_of_no_open_call_come_back(known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []

    async def replay(_: FakeSession, executions: Sequence[ToolExecution]) -> None:
        replayed.extend(executions)

    monkeypatch.setattr(FakeSession, "replay", replay)
    first = Trajectory(ADD, ANSWER)
    answer = (await first.run(calls_tools_apart)).final_answer
    assert [[event.name for event in call.events] for call in first.calls] == [["tool"] * 2, ["tool"]]
    assert [call.tool_executions for call in first.calls] == [(), ()]
    second = Next(read_again(first.calls[:known]), *[ADD, ANSWER][known:], "never")
    assert (await second.run(calls_tools_apart)).final_answer == answer == "['7', '8', '3']"
    come_back = (0, 2, 3)[known]
    assert len(second.tools.calls) == 3 - come_back
    assert second.rollout.tool_calls == 3
    assert [each.arguments for each in replayed] == [
        {"a": number, "b": 2} for number in (5, 6, 1)[:come_back]
    ]  # fmt: skip


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_tool_with_effects_runs_once_where_no_model_call_can_say_that_it_began(
    is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSession, "state_of", lambda *_: ToolState.OUTSIDE)
    kept: list[list[Event]] = []

    async def keep(_: object, events: Sequence[Event]) -> None:
        kept.append(list(events))

    monkeypatch.setattr(rollout_fakes._Writes, "keep_events", keep)
    first = Trajectory(ADD, ANSWER)
    answer = (await first.run(calls_tools_apart)).final_answer
    assert answer == "['7', '8', '3']"
    assert len(first.tools.calls) == 3
    assert [len(events) for events in kept] == [1, 1, 2, 2, 3, 3]  # begun and ended
    calls, events = (first.calls[:1], kept[2]) if is_killed else (first.calls, kept[-1])
    second = Next([], *([ANSWER] if is_killed else []), "never")
    second.journal = Journal(read_again(calls), second._drop, second._note, events)
    again = (await second.run(calls_tools_apart)).final_answer
    if is_killed:  # in the second of them
        assert again is not None
        assert again.startswith("['7', 'Error: the call was interrupted after it had begun")
        assert len(second.tools.calls) == 1
    else:
        assert (again, second.tools.calls) == (answer, [])


@pytest.mark.parametrize("known", [3, 4])
async def test_parallel_branches_may_ask_in_another_order(known: int) -> None:
    slow = "A"

    async def agent(rollout: Rollout) -> Outcome:
        async def branch(name: str) -> None:
            messages = [{"role": "user", "content": name}]
            for _ in range(2):
                message, _ = await rollout.complete(messages)
                messages += [message, {"role": "user", "content": "go on"}]
                await asyncio.sleep(0.01 * (name == slow))

        await asyncio.gather(branch("A"), branch("B"))
        return Outcome(StopReason.ANSWERED, "3")

    first = Trajectory("a0", "b0", "b1", "a1")
    await first.run(agent)
    before = sorted(first.calls, key=lambda call: call.index)
    assert [call.parent for call in before] == [None, None, before[1].id, before[0].id]
    slow = "B"
    second = Next(before[:known], "a1", "never")
    await second.run(agent)
    assert second.dropped == []
    assert len(second.engine.prompts) == 4 - known


async def test_what_came_back_is_noted_before_the_next_call_is_made() -> None:
    first = Trajectory(*SCRIPT)
    await first.run()
    second = Next(first.calls[:2])
    noted = [(2, sum(call.generated_tokens for call in first.calls[:2]))]
    second.engine.script = [lambda _: ANSWER if second.noted == noted else "too late"]
    assert (await second.run()).final_answer == "3"


@pytest.mark.parametrize("is_interrupted", [False, True])
async def test_an_agent_cannot_go_on_with_state_that_was_made_again_in_part(
    is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Trajectory(ADD, ADD, ADD, ANSWER)
    await first.run()
    second = Next(first.calls[:2], ADD, ANSWER)

    async def replay(*_: object) -> None:
        if is_interrupted:
            await asyncio.Event().wait()
        raise ToolServerError("it is gone", hint="")

    async def agent(rollout: Rollout) -> Outcome:
        while True:
            turn = await rollout.generate()
            with suppress(ToolServerError, TimeoutError):
                async with asyncio.timeout(0.01):
                    await rollout.call_tools(turn)

    monkeypatch.setattr(FakeSession, "replay", replay)
    with pytest.raises(ReplayError if is_interrupted else ToolServerError):
        await second.run(agent)
    assert second.tools.calls == []


def read_again(calls: Sequence[DispatchedSamplingTask]) -> list[DispatchedSamplingTask]:
    """The calls as the database returns them."""
    options = CodecOptions[dict[str, Any]](tz_aware=True)
    documents = [bson.decode(bson.encode(call.to_document()), options) for call in calls]
    return [DispatchedSamplingTask.from_document(document) for document in documents]


async def test_times_of_once_are_those_that_are_read_again() -> None:
    async def agent(rollout: Rollout) -> Outcome:
        moment = await rollout.once("time", lambda: datetime(2026, 1, 1, microsecond=1, tzinfo=UTC))
        rollout.append_messages([{"role": "user", "content": f"it is {moment!r}"}])
        await rollout.generate()
        return Outcome(StopReason.ANSWERED, "3")

    first = Trajectory("a")
    await first.run(agent)
    second = Next(read_again(first.calls), "never")
    await second.run(agent)
    assert second.dropped == []


async def test_tools_of_parallel_roles_are_replayed_in_the_order_in_which_they_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed = []

    async def replay(_: FakeSession, executions: Sequence[ToolExecution]) -> None:
        replayed.extend(each.arguments["a"] for each in executions)  # type: ignore[index]

    monkeypatch.setattr(FakeSession, "replay", replay)
    is_slow = True

    async def agent(rollout: Rollout) -> Outcome:
        async def play(name: str) -> None:
            role = rollout.role(name)
            for _ in range(2):
                turn = await role.generate()
                if is_slow and name == "a":
                    await asyncio.sleep(0.02)
                await role.call_tools(turn)

        await asyncio.gather(play("a"), play("b"))
        return Outcome(StopReason.ANSWERED, "3")

    first = Trajectory(*(ADD.replace("1", str(number)) for number in range(10, 14)))
    await first.run(agent)
    before = sorted(first.calls, key=lambda call: call.index)
    runs = [execution for call in before for execution in call.tool_executions]
    is_slow = False
    second = Next(before, "never")
    await second.run(agent)
    ordered = sorted(runs, key=lambda run: run.started_at or now())
    assert ordered != runs
    assert replayed == [run.arguments["a"] for run in ordered]  # type: ignore[index]


async def test_parallel_questions_get_their_own_values_again() -> None:
    refused = 1

    async def agent(rollout: Rollout) -> Outcome:
        async def look_up(number: int) -> int:
            await asyncio.sleep(0.01 * (3 - number))
            if number == refused:
                raise ValueError
            return number

        asked = [rollout.once("look up", partial(look_up, number)) for number in range(4)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        await rollout.generate()
        return Outcome(StopReason.ANSWERED, str([each for each in found if isinstance(each, int)]))

    first = Trajectory("a")
    assert (await first.run(agent)).final_answer == "[0, 2, 3]"
    assert [event.result for event in first.calls[0].events] == [0, 2, 3]
    refused = 3
    second = Next(first.calls, "never")
    assert (await second.run(agent)).final_answer == "[0, 2, 3]"


async def test_arguments_that_look_like_references_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "state_of", lambda *_: ToolState.OUTSIDE)
    arguments = '{"a": {"$ref": "x", "$id": 1}, "b.c": 1, "$d": 2, "": 3}'
    first = Trajectory(f'<tool_call>{{"name": "fail", "arguments": {arguments}}}</tool_call>', ANSWER)
    await first.run()
    second = Next(read_again(first.calls[:1]), ANSWER)
    await second.run()
    assert (len(first.tools.calls), second.tools.calls) == (1, [])


async def test_an_answer_of_the_environment_comes_back_to_its_own_call() -> None:
    def step(answer: str) -> Event:
        return Event(name=STEP, arguments="hit", result=answer, started_at=now(), seconds=0.0, attempt=1)

    one, other = step("a"), step("b")
    first = Trajectory("x", "y")
    await first.run(talk("a"))
    calls = [replace(first.calls[0], events=(one,)), replace(first.calls[1], events=(other,))]
    journal = Next(calls).journal
    assert journal is not None
    assert journal.event(STEP, "stand") is None
    assert journal.event(STEP, "hit", (other,)) is other
    assert journal.event(STEP, "hit", (other,)) is one
    assert journal.event(STEP, "hit") is None
    assert journal.done == [other, one]


class Files:
    """What sessions that keep files were asked for; ``has``: what was kept can be restored."""

    def __init__(self) -> None:
        self.has = True
        self.restored: list[str] = []
        self.replayed: list[str] = []


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    asked = Files()

    async def snapshot(session: FakeSession) -> str:
        return f"files after {len(session.tools.calls)}"

    async def restore(_: FakeSession, reference: str) -> bool:
        asked.restored.append(reference)
        return asked.has

    async def replay(_: FakeSession, executions: Sequence[ToolExecution]) -> None:
        asked.replayed += [execution.name for execution in executions]

    for name, method in (("snapshot", snapshot), ("restore", restore), ("replay", replay)):
        monkeypatch.setattr(FakeSession, name, method)
    monkeypatch.setattr(FakeSession, "keeps_files", True)
    monkeypatch.setattr(FakeSession, "state_of", lambda *_: ToolState.SNAPSHOT)
    return asked


async def kept(agent: str | Agent = "react", script: Sequence[str] = (ADD, ADD, ADD, ADD, ANSWER)) -> Any:
    """The stored calls of a trajectory whose tools keep files."""
    first = Trajectory(*script)
    await first.run(agent)
    return [turn.document() for turn in first.rollout._calls.made]


async def test_files_are_kept_with_the_call_that_they_follow(files: Files) -> None:
    calls = await kept()
    assert [call.snapshot for call in calls] == [*(f"files after {n}" for n in (1, 2, 3, 4)), None]
    by_roles = await kept(talk("ab"), [ADD] * 6)
    assert {call.snapshot for call in by_roles if call.role == "b"} == {None}, "two roles act"
    assert files.restored == []


@pytest.mark.parametrize(
    ("last", "has", "restored", "replayed"),
    [("kept", True, 3, 0), ("not kept", True, 2, 1), ("cut off", True, 2, 0), ("kept", False, 3, 3)],
)
async def test_the_last_files_are_restored_and_the_calls_after_them_made_again(
    files: Files, last: str, has: bool, restored: int, replayed: int
) -> None:
    before = (await kept())[:3]
    if last == "not kept":
        before[-1] = replace(before[-1], snapshot=None)
    if last == "cut off":
        before[-1] = replace(before[-1], snapshot=None, tool_executions=())
    files.has = has
    second = Next(before, ADD, ANSWER)
    await second.run()
    assert files.restored == [f"files after {restored}"]
    assert len(files.replayed) == replayed
    assert len(second.tools.calls) == (2 if last == "cut off" else 1)


async def test_a_trajectory_whose_files_cannot_be_restored_cannot_go_on(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (await kept())[:3]

    async def restore(*_: object) -> bool:
        raise ToolServerError("the disk is full")

    monkeypatch.setattr(FakeSession, "restore", restore)
    with pytest.raises(ReplayError, match="cannot be restored: the disk is full"):
        await Next(before, ADD, ANSWER).run()
    assert files.replayed == []


async def test_files_with_work_that_is_not_asked_for_again_are_left(files: Files) -> None:
    before = (await kept())[:2]

    async def other(rollout: Rollout) -> Outcome:
        for name in ("call_tools", "ignore"):
            turn = await rollout.generate()
            if name == "call_tools":
                await rollout.call_tools(turn)
        await rollout._calls.rebuild(rollout._shared.tools)
        return Outcome(StopReason.ANSWERED, "3")

    await Next(before, ANSWER).run(other)
    assert (files.restored, files.replayed) == ([], ["add"])
