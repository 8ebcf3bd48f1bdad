"""Check that a full context is reset before the call, and that each generated token is trained once."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_fakes import CUT
from trajectories import ADD, ANSWER, FULL, LONG, Trajectory, converted, trained

from agentrl.chat.chat_format import Message
from agentrl.documents.model_call import unpack_ids
from agentrl.documents.status import StopReason
from agentrl.errors import TrajectoryError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.rollout import Rollout

SHOTS = ({"role": "user", "content": "0?"}, {"role": "assistant", "content": "0"})


@pytest.mark.parametrize(
    ("manager", "script"),
    [
        ("discard_all_tools", (ADD, ANSWER)),
        ("discard_all", (LONG + ADD, "it is 3", ANSWER)),
        ("summarize", (LONG + ADD, "it is 3", ANSWER)),
    ],
)
async def test_each_generated_token_of_every_context_is_trained_once(
    manager: str, script: tuple[str, ...]
) -> None:
    limits = {"max_prompt_tokens": 900, "prompt_reserve_tokens": 710}
    flags: dict[str, Any] = {"new_context": manager, "system_prompt": "S", **limits}
    trajectory = Trajectory(*script, task={"messages": SHOTS}, **flags)
    trajectory.tools.text = "x" * 100
    assert (await trajectory.run()).final_answer == "3"
    assert_every_context_is_a_branch(trajectory, contexts=trajectory.rollout.context_resets + 1)
    assert trajectory.rollout.context_resets >= 1
    for call in trajectory.calls:
        if call.parent is None:
            assert [m["content"] for m in call.messages[:3]] == ["S", "0?", "0"]
    assert all(len(prompt) <= 900 for prompt in trajectory.engine.prompts)


def assert_every_context_is_a_branch(trajectory: Trajectory, contexts: int) -> None:
    """Check the converted data: a root per context, its ids those of the engine, each output trained once."""
    assert sorted(trained(trajectory)) == sorted(trajectory.engine.outputs)
    assert [call.parent is None for call in trajectory.calls].count(True) == contexts
    nodes = converted(trajectory).nodes
    assert [node.parent for node in nodes] == [-1] * contexts
    ids = unpack_ids(converted(trajectory).input_ids).tolist()
    following = [*(call.parent is None for call in trajectory.calls[1:]), True]
    ends = [place for place, is_last in enumerate(following) if is_last]
    assert [ids[node.start : node.end] for node in nodes] == [
        trajectory.engine.prompts[end] + trajectory.engine.outputs[end] for end in ends
    ]


async def test_a_summary_keeps_the_latest_calls_that_fit() -> None:
    limits = {"max_prompt_tokens": 900, "prompt_reserve_tokens": 600}
    trajectory = Trajectory(LONG + ADD + ADD, "it is 3", ANSWER, new_context="summarize", **limits)
    assert (await trajectory.run()).final_answer == "3"
    assert [m["role"] for m in trajectory.calls[-1].messages] == ["user"]  # the long text does not fit
    trajectory = Trajectory(LONG, ADD + ADD, "it is 3", ANSWER, new_context="summarize", **limits)
    assert (await trajectory.run()).final_answer == "3"
    last = trajectory.calls[-1]
    assert [m["role"] for m in last.messages] == ["user", "assistant", "tool", "tool"]
    assert [m["content"] for m in last.messages[2:]] == ["3", "3"]
    assert sorted(trained(trajectory)) == sorted(trajectory.engine.outputs)


async def test_results_that_do_not_fit_even_into_the_reserve_are_left_out_of_the_summary() -> None:
    trajectory = Trajectory("I look. " + ADD, "it is 3", ANSWER, new_context="discard_all", **FULL)
    trajectory.tools.text = "x" * 1000
    assert (await trajectory.run()).final_answer == "3"
    first, summary, _ = trajectory.calls
    assert first.tool_executions[0].result == "x" * 1000
    assert summary.messages[0]["content"] == "[not shown: a result of 1,000 characters does not fit]"
    assert all(len(prompt) <= FULL["max_prompt_tokens"] for prompt in trajectory.engine.prompts)
    assert_every_context_is_a_branch(trajectory, contexts=2)


async def test_a_cut_call_resets_the_context() -> None:
    trajectory = Trajectory("a thought without end" + CUT, "it is 3", ANSWER, new_context="discard_all")
    assert (await trajectory.run()).final_answer == "3"
    assert_every_context_is_a_branch(trajectory, contexts=2)


async def test_a_summary_counts_as_a_turn() -> None:
    trajectory = Trajectory(LONG + ADD, "it is 3", ANSWER, new_context="discard_all", max_turns=2, **FULL)
    assert await trajectory.run() == Outcome(StopReason.TURNS_LIMIT)
    assert len(trajectory.calls) == 2


async def test_generate_resets_a_full_context_by_itself() -> None:
    async def careless(rollout: Rollout) -> Outcome:
        await rollout.call_tools(await rollout.generate())
        return Outcome(StopReason.ANSWERED, (await rollout.generate()).answer)

    trajectory = Trajectory(LONG + ADD, "it is 3", ANSWER, new_context="discard_all", **FULL)
    assert await trajectory.run(careless) == Outcome(StopReason.ANSWERED, "3")
    ended = Trajectory(LONG + ADD, ANSWER, **FULL)
    assert await ended.run(careless) == Outcome(StopReason.LENGTH_LIMIT)


async def test_a_question_that_does_not_fit_ends_the_trajectory_before_any_call() -> None:
    for manager in ("discard_all", "summarize", "discard_all_tools"):
        trajectory = Trajectory(ANSWER, new_context=manager, max_prompt_tokens=40, prompt_reserve_tokens=20)
        assert await trajectory.run() == Outcome(StopReason.LENGTH_LIMIT)
        assert trajectory.calls == []


async def test_a_context_manager_that_resets_the_context_itself_fails_the_trajectory() -> None:
    async def again(rollout: Rollout) -> list[Message] | None:
        await rollout.reset_context()
        return None

    trajectory = Trajectory(LONG + ADD, **FULL)
    trajectory.manager = again
    with pytest.raises(TrajectoryError, match="resets the context itself"):
        await trajectory.run()
