"""Model calls from whole conversations: what extends an earlier call goes on from its ids, edits branch."""

from __future__ import annotations

import asyncio

import pytest
from trajectories import ADD, Trajectory, converted, trained

from agentrl.chat.chat_format import Message
from agentrl.documents.status import CallStatus, StopReason
from agentrl.errors import TrajectoryError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.rollout import Rollout


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
