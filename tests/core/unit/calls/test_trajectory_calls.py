"""Model calls are stored in order and bounded; whole conversations continue sampled ids or branch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from trajectories import ADD, Trajectory, converted, trained
from waiting import cancel

from agentrl.calls import trajectory_calls
from agentrl.calls.trajectory_calls import CallWriter
from agentrl.calls.turns import Turn
from agentrl.chat.chat_format import Message
from agentrl.documents.conversation import change_of, divergences, prefix_digests
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.status import CallStatus, StopReason
from agentrl.documents.task import Claim, Task
from agentrl.errors import LeaseLostError, TrajectoryError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.rollout import Rollout

CLAIM = Claim(
    task=Task(id="train/0/t", task_id="t", split="train", epoch=0, order=0, query="q"),
    traj_id=0, attempt=1, owner="o",
)  # fmt: skip


class SlowCalls:
    """A store whose writes wait for ``opened``; ``error`` fails the write of a call with this index."""

    def __init__(self, failing: int | None = None) -> None:
        self.begun = asyncio.Event()
        self.opened = asyncio.Event()
        self.failing = failing
        self.stored: list[int] = []

    async def add(
        self, claim: Claim, *calls: DispatchedSamplingTask, new_executions: Sequence[int] = (),
        new_spent: Sequence[object] = (),
    ) -> None:  # fmt: skip
        """Store calls."""
        self.begun.set()
        await self.opened.wait()
        for call in calls:
            if call.index == self.failing:
                raise LeaseLostError("the claim is lost")
            self.stored.append(call.index)


def writer_of(calls: SlowCalls) -> CallWriter:
    return CallWriter(cast(Any, SimpleNamespace(model_calls=calls)), CLAIM)


@pytest.fixture
async def pending() -> list[Turn]:
    """The calls of a trajectory, as its Rollout hands them over."""
    trajectory = Trajectory(*"abcdefghijklmnopq", max_turns=17)
    await trajectory.run()
    return trajectory.pending


async def test_calls_are_stored_in_order_and_nobody_waits_for_the_database(
    pending: list[Turn],
) -> None:
    calls = SlowCalls()
    async with asyncio.timeout(10), writer_of(calls) as writer:
        for call in pending[:4]:
            await writer.write(call)
        assert calls.stored == []
        calls.opened.set()
        await writer.flush()
        assert calls.stored == [0, 1, 2, 3]
        assert not any(call.prompt.ids for call in pending[:4]), "an agent that keeps its turns keeps prompts"
        await writer.flush()


async def test_a_trajectory_waits_for_a_database_that_is_too_slow(pending: list[Turn]) -> None:
    calls = SlowCalls()
    async with asyncio.timeout(10), writer_of(calls) as writer:
        for call in pending[:16]:
            await writer.write(call)
        last = asyncio.create_task(writer.write(pending[16]))
        done, _ = await asyncio.wait([last], timeout=0.2)
        assert not done
        calls.opened.set()
        await last
        await writer.flush()
    assert calls.stored == [*range(17)]


async def test_a_busy_process_writes_later_but_not_never(
    pending: list[Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_calls, "_BUSY_SECONDS", -1.0)  # every timer is late
    monkeypatch.setattr(trajectory_calls, "_LONGEST_SECONDS", 0.3)
    calls = SlowCalls()
    async with asyncio.timeout(20), writer_of(calls) as writer:
        started = time.monotonic()
        await writer.write(pending[0])
        await calls.begun.wait()
        assert time.monotonic() - started >= 0.3
        calls.opened.set()
        await writer.flush()
    assert calls.stored == [0]


async def test_many_queued_calls_are_written_by_a_busy_process(
    pending: list[Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_calls, "_INTERVAL_SECONDS", 60.0)
    calls = SlowCalls()
    calls.opened.set()
    async with asyncio.timeout(20), writer_of(calls) as writer:
        for call in pending[:12]:
            assert not calls.begun.is_set()
            await writer.write(call)
        await calls.begun.wait()


async def test_an_error_surfaces_before_the_score_and_nothing_is_stored_after_it(
    pending: list[Turn],
) -> None:
    calls = SlowCalls(failing=1)
    calls.opened.set()
    async with asyncio.timeout(10), writer_of(calls) as writer:
        for call in pending[:3]:
            await writer.write(call)
        for _ in range(2):
            with pytest.raises(LeaseLostError):
                await writer.flush()
        with pytest.raises(LeaseLostError):
            await writer.write(pending[3])
    assert calls.stored == [0]


async def test_a_cancelled_trajectory_still_stores_what_is_queued(pending: list[Turn]) -> None:
    calls = SlowCalls()
    calls.opened.set()

    async def run() -> None:
        async with writer_of(calls) as writer:
            await writer.write(pending[0])
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        await cancel(task)
    assert calls.stored == [0]


async def test_a_stored_call_keeps_its_ids_alone(pending: list[Turn]) -> None:
    call, calls = pending[0], SlowCalls()
    ids = call.generation.output_ids
    call.generation = replace(call.generation, routing=b"experts", sampling_mask=b"mask")
    calls.opened.set()
    async with asyncio.timeout(10), writer_of(calls) as writer:
        await writer.write(call)
        await writer.flush()
        held = call.generation
        assert (held.routing, held.sampling_mask, held.logprobs, call.prompt.ids) == (b"", b"", (), [])
        assert held.output_ids == ids


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def test_an_extended_conversation_continues_the_sampled_ids_and_an_edited_one_branches() -> None:
    async def agent(rollout: Rollout) -> Outcome:
        talk = rollout.first_messages
        first, _ = await rollout.complete(talk)
        talk = [*talk, first, user("sure?")]
        second, _ = await rollout.complete(talk)
        await rollout.complete([*talk, second, user("so?")])  # extends
        edited = [user("summary: 1+2"), user("so?")]
        await rollout.complete(edited)  # a new history
        await rollout.complete([*rollout.first_messages, {**first, "content": "I say 4"}, user("sure?")])
        return Outcome(StopReason.ANSWERED, "3", 1.0)

    trajectory = Trajectory(" 3 ", "yes", "3!", "three", "no")
    await trajectory.run(agent)
    base = "train/0/t/0/1"
    assert [call.parent for call in trajectory.calls] == [None, f"{base}/0", f"{base}/1", None, None]
    assert [call.opens_branch for call in trajectory.calls] == [True, False, False, True, True]
    assert trajectory.rollout.train_rule == "all"
    prompts, outputs = trajectory.engine.prompts, trajectory.engine.outputs
    assert prompts[2][: len(prompts[1]) + len(outputs[1])] == [*prompts[1], *outputs[1]]
    assert sum(call.is_context_reset for call in trajectory.calls) == 0
    assert sorted(trained(trajectory)) == sorted(outputs), "every sampled token is trained once"
    assert sum(node.parent == -1 for node in converted(trajectory).nodes) == 3
    assert [message["content"] for message in trajectory.rollout.messages][-1] == "3!", "the main branch"


async def test_parallel_calls_from_one_conversation_are_branches_of_it() -> None:
    async def agent(rollout: Rollout) -> Outcome:
        talk = rollout.first_messages
        first, _ = await rollout.complete(talk)
        left, right = [*talk, first, user("left")], [*talk, first, user("right")]
        (one, _), _ = await asyncio.gather(rollout.complete(left), rollout.complete(right))
        await rollout.complete([*left, one, user("and?")])
        return Outcome(StopReason.ANSWERED, "3", 1.0)

    trajectory = Trajectory("a", "b", "c", "d")
    await trajectory.run(agent)
    base = "train/0/t/0/1"
    assert [call.parent for call in trajectory.calls] == [None, f"{base}/0", f"{base}/0", f"{base}/1"]
    assert len({call.sampling_params["sampling_seed"] for call in trajectory.calls}) == 4
    data = converted(trajectory)
    assert [node.parent for node in data.nodes] == [-1, 0, 0]
    assert sorted(trained(trajectory)) == sorted(trajectory.engine.outputs)


async def test_tools_are_recorded_with_the_call_that_asked_for_them() -> None:
    async def agent(rollout: Rollout) -> Outcome:
        talk, schemas = rollout.first_messages, rollout.schemas
        asks, turn = await rollout.complete(talk, schemas)
        call = asks["tool_calls"][0]
        assert turn.tool_calls[0].name == "add"
        text, failed = await rollout.call_tool(call["id"], "add", call["function"]["arguments"])
        assert (text, failed) == ("3", False)
        answer = {"role": "tool", "content": text, "tool_call_id": call["id"]}
        await rollout.complete([*talk, asks, answer], schemas)
        text, failed = await rollout.call_tool("unknown", "add", {"a": "x"})
        assert failed
        assert text.startswith("Error:")
        return Outcome(StopReason.ANSWERED, "3", 1.0)

    trajectory = Trajectory(ADD, "<answer>3</answer>")
    await trajectory.run(agent)
    first, second = trajectory.calls
    assert [execution.result for execution in first.tool_executions] == ["3"]
    assert second.parent == first.id
    assert second.messages[0]["execution"] == 0, "the result is stored once"
    assert trajectory.rollout.tool_calls == 2


async def test_a_malformed_tool_call_stays_readable_and_is_a_format_error() -> None:
    async def agent(rollout: Rollout) -> Outcome:
        talk = rollout.first_messages
        broken, turn = await rollout.complete(talk, rollout.schemas)
        assert turn.error is not None
        assert "tool_call" in broken["content"]
        await rollout.complete([*talk, broken, user("again")], rollout.schemas)
        return Outcome(StopReason.ANSWERED, "3", 1.0)

    trajectory = Trajectory('<tool_call>{"name": </tool_call>', "<answer>3</answer>")
    await trajectory.run(agent)
    assert trajectory.statuses == [CallStatus.FORMAT_ERROR, CallStatus.COMPLETED]
    assert trajectory.calls[1].parent == trajectory.calls[0].id


async def test_the_two_ways_to_call_do_not_mix_and_limits_end_the_trajectory() -> None:
    async def mixed(rollout: Rollout) -> Outcome:
        await rollout.complete(rollout.first_messages)
        with pytest.raises(TrajectoryError, match="complete\\(\\) calls"):
            await rollout.generate()
        with pytest.raises(TrajectoryError, match="the last message is the assistant's"):
            await rollout.complete([{"role": "assistant", "content": "x"}])
        while True:
            await rollout.complete(rollout.first_messages)

    trajectory = Trajectory("x", max_turns=3)
    assert (await trajectory.run(mixed)).stop_reason is StopReason.TURNS_LIMIT
    assert len(trajectory.calls) == 3

    async def long(rollout: Rollout) -> Outcome:
        await rollout.complete([user("long " * 100)])
        return Outcome(StopReason.ANSWERED, "x", 1.0)

    trajectory = Trajectory("x", max_prompt_tokens=200, prompt_reserve_tokens=10)
    assert (await trajectory.run(long)).stop_reason is StopReason.LENGTH_LIMIT


FIRST = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
SECOND = {"id": "b", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
CALLED: Message = {"role": "assistant", "content": "I add.", "tool_calls": [FIRST, SECOND]}


@pytest.mark.parametrize(
    ("changed", "how"),
    [
        ({"content": ""}, "without its text"),
        ({"content": None}, "without its text"),
        ({"content": "I  add."}, "with another text"),
        ({"tool_calls": [SECOND, FIRST]}, "with its tool calls in another order"),
        ({"tool_calls": [FIRST]}, "with other tool calls or arguments"),
        ({"content": None, "tool_calls": []}, "without its text and without its tool calls"),
        ({"content": "\n I add. "}, None),
        ({"tool_calls": [{**FIRST, "id": ""}, {"function": SECOND["function"]}]}, None),
        ({"tool_calls": [{"function": {"arguments": {"b": 2, "a": 1}, "name": "add"}}, SECOND]}, None),
        ({"reasoning_content": "hm", "name": "x"}, None),
    ],
)
def test_what_a_client_changed_in_an_answer_is_named(changed: dict[str, Any], how: str | None) -> None:
    sent = {**CALLED, **changed}
    assert change_of(CALLED, sent) == how
    continues = prefix_digests([CALLED], [])[-1] == prefix_digests([sent], [])[-1]
    assert continues is (how is None)


async def test_a_request_with_a_changed_answer_branches_off_behind_the_last_unchanged_one() -> None:
    async def agent(rollout: Rollout) -> Outcome:
        talk = rollout.first_messages
        first, _ = await rollout.complete(talk)
        talk = [*talk, first, user("sure?")]
        second, _ = await rollout.complete(talk)
        talk = [*talk, {**second, "content": ""}, user("so?")]
        third, _ = await rollout.complete(talk)  # a branch
        await rollout.complete([*talk, third, user("and?")])  # continues it
        await rollout.complete([*talk, {**third, "content": "No."}, user("and?")])
        await rollout.complete(talk)
        await rollout.complete([*rollout.first_messages, first, user("really?")])
        await rollout.complete([user("summary")])
        await rollout.complete([user("summary")], rollout.schemas)
        return Outcome(StopReason.ANSWERED, "3", 1.0)

    trajectory = Trajectory(f"One. {ADD}", f"Two. {ADD}", "3", "4", "5", "6", "7", "8", "9")
    await trajectory.run(agent)
    calls = sorted(trajectory.calls, key=lambda call: call.index)
    parents = [call.parent and int(call.parent.rpartition("/")[2]) for call in calls]
    assert parents == [None, 0, 0, 2, 0, 0, 0, None, None]
    assert divergences(calls) == {
        2: "the request has the answer of turn 2 without its text",
        4: "the request has the answer of turn 3 with another text",
        5: "the request is that of turn 3 again",
        6: "message 3 of the request, user, is not that of turn 6",
        7: "message 1 of the request, user, is not that of turn 1",
        8: "the tools of the request are not those of turn 8",
    }
    prompts, outputs = trajectory.engine.prompts, trajectory.engine.outputs
    for number in (2, 4, 5, 6):
        assert prompts[number][: len(prompts[0]) + len(outputs[0])] == [*prompts[0], *outputs[0]]
