"""What ``rollout.once`` returns is what every later owner of the trajectory gets, whatever it is."""

from __future__ import annotations

import asyncio
import datetime
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import bson
import pytest
from bson.codec_options import CodecOptions
from hypothesis import given
from hypothesis import strategies as st
from test_journal import Next, read_again
from trajectories import ANSWER, Trajectory

from agentrl.calls.journal import Journal
from agentrl.calls.trajectory_calls import TrajectoryCalls
from agentrl.documents.document import now, sanitize_bson
from agentrl.documents.model_call import Event, ToolExecution, read_arguments, storable_arguments
from agentrl.documents.status import StopReason
from agentrl.errors import TrajectoryError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.rollout import Rollout

READ = CodecOptions[dict[str, Any]](tz_aware=True)

NASTY_KEYS = ("$ref", "$id", "$db", "a.b", "$set", "", "a\0b", "\ud800", 1, None, True, 2.5, b"x")
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.integers(2**62, 2**70) | st.floats() | st.text()
    | st.sampled_from(["\ud800", "a\0b"]) | st.binary() | st.dates() | st.decimals() | st.uuids()
    | st.fractions() | st.datetimes(timezones=st.none() | st.timezones())
)  # fmt: skip
KEYS = st.sampled_from(NASTY_KEYS) | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.frozensets(st.integers() | st.text())
    ),
    max_leaves=12,
)


def read(result: Any) -> Any:
    """A value as the next owner gets it."""
    event = Event(name="x", result=result, started_at=now(), seconds=0.0, attempt=1)
    document = bson.decode(bson.encode(event.to_document()), READ)
    return sanitize_bson(Event.from_document(document).result)


@given(VALUES)
def test_a_stored_value_equals_what_is_read_again(value: Any) -> None:
    first = sanitize_bson(value)
    assert repr(read(first)) == repr(first) == repr(sanitize_bson(first))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NASTY_KEYS[:6]) | st.text(), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text() | st.sampled_from(NASTY_KEYS[:6]), JSON))
def test_stored_arguments_are_those_that_were_given(arguments: dict[str, Any]) -> None:
    stored = bson.decode(bson.encode({"a": storable_arguments(arguments)}), READ)["a"]
    assert repr(read_arguments(stored)) == repr(arguments)


NASTY = [
    {"$ref": "c", "$id": 1, "k": [{"$ref": "c", "$id": {"a.b": 1}}]}, {"$ref": "#/a"}, {"$set": {"a.b": 1}},
    {1: "a", "1": "b", None: (1, 2)}, 2**63, -(2**70), math.nan, -math.inf, b"\0\xff", {3, 1, 2},
    Decimal("1.10"), Fraction(1, 3), UUID(int=1), datetime.date(2026, 1, 1),
    datetime.datetime(2026, 1, 1, microsecond=1999), "\ud800\0",
    datetime.datetime(1, 1, 1, tzinfo=ZoneInfo("Asia/Shanghai")),
]  # fmt: skip


async def test_every_owner_gets_the_same_value_and_may_change_it() -> None:
    def asks(spoil: bool) -> Any:
        async def agent(rollout: Rollout) -> Outcome:
            found = await rollout.once("nasty", lambda: NASTY)
            said = repr(found)
            if spoil:
                found.clear()
            turn = await rollout.generate()
            return Outcome(StopReason.ANSWERED, said + turn.content)

        return agent

    first = Trajectory(ANSWER)
    said = (await first.run(asks(spoil=True))).final_answer
    second = Next(read_again(first.calls), "never")
    assert (await second.run(asks(spoil=True))).final_answer == said
    third = Next(read_again(second.documents), "never")
    assert (await third.run(asks(spoil=False))).final_answer == said


@pytest.mark.parametrize("inner", ["outer", "inner"])
@pytest.mark.parametrize("is_parallel", [False, True])
async def test_a_question_inside_of_another_belongs_to_it(inner: str, is_parallel: bool) -> None:
    count = 0

    async def agent(rollout: Rollout) -> Outcome:
        def number() -> int:
            nonlocal count
            count += 1
            return count

        async def asks() -> list[int]:
            await asyncio.sleep(0)
            return [await rollout.once(inner, number), await rollout.once(inner, number)]

        questions = [lambda: rollout.once("outer", asks), lambda: rollout.once(inner, number)]
        if is_parallel:
            found: list[Any] = await asyncio.gather(*(ask() for ask in questions))
        else:
            found = [await ask() for ask in questions]
        turn = await rollout.generate()
        return Outcome(StopReason.ANSWERED, f"{found} {turn.content}")

    first = Trajectory("a")
    said = (await asyncio.wait_for(first.run(agent), 10)).final_answer
    assert sorted(event.name for event in first.calls[0].events) == sorted(["outer", inner])
    second = Next(read_again(first.calls), "never")
    assert (await asyncio.wait_for(second.run(agent), 10)).final_answer == said
    assert count == 3


async def test_a_question_after_one_that_failed_is_stored() -> None:
    async def agent(rollout: Rollout) -> Outcome:
        def refuses() -> None:
            raise TrajectoryError("no")

        with pytest.raises(TrajectoryError, match="no"):
            await rollout.once("a", refuses)
        found = await rollout.once("b", lambda: 1)
        await rollout.generate()
        return Outcome(StopReason.ANSWERED, str(found))

    first = Trajectory("a")
    await first.run(agent)
    assert [event.name for event in first.calls[0].events] == ["b"]


@pytest.mark.parametrize("number", [math.nan, -math.inf, 2**70, 1.0])
def test_a_stored_tool_run_is_found_by_any_arguments(number: float) -> None:
    """One with effects outside would run twice otherwise."""
    given = {"a": [number], "b": {"c": number}}
    run = ToolExecution(
        name="send", arguments=storable_arguments(given), result="sent", error=False, seconds=0.0
    )
    stored = ToolExecution.from_document(bson.decode(bson.encode(run.to_document()), READ))

    async def never(*_: object) -> None:
        raise AssertionError

    journal = Journal([], never, never)
    assert journal.execution([stored], "send", {**given, "a": [0.5]}) is None
    left = [stored]
    assert journal.execution(left, "send", given) is stored
    assert left == []


async def test_a_slow_question_delays_only_those_with_its_arguments() -> None:
    """The next owner gets equal questions in their order; others are stored when they are answered."""
    calls: list[TrajectoryCalls] = []

    async def agent(rollout: Rollout) -> Outcome:
        await rollout.generate()
        calls.append(rollout._calls)
        going = asyncio.Event()

        async def ask(arguments: str, *, is_slow: bool) -> None:
            async def answer() -> str:
                if is_slow:
                    await going.wait()
                return arguments

            await rollout._calls.event("tool", answer, arguments)

        slow = asyncio.create_task(ask("a", is_slow=True))
        await asyncio.sleep(0)
        equal = asyncio.create_task(ask("a", is_slow=False))
        await ask("b", is_slow=False)
        seen = [event.arguments for event in rollout._calls.made[0].events]
        going.set()
        await asyncio.gather(slow, equal)
        return Outcome(StopReason.ANSWERED, str(seen))

    assert (await Trajectory("x").run(agent)).final_answer == "['b']"
    assert [event.arguments for event in calls[0].made[0].events] == ["b", "a", "a"]
