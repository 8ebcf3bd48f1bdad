"""Test the built-in agents on a scripted engine."""

from __future__ import annotations

import json

import pytest
from rollout_fakes import CUT, PLAIN, format_of
from trajectories import ADD, ANSWER, FULL, LONG, Trajectory, trained

from agentrl.documents.model_call import full_messages, unpack_ids
from agentrl.documents.status import CallStatus, StopReason
from agentrl.documents.task_json import make_task
from agentrl.errors import ToolServerError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import SUMMARY_HEADING, without_tools
from agentrl.rollout.rollout import Rollout

FAIL = '<tool_call>{"name": "fail", "arguments": {}}</tool_call>'


async def test_an_attempt_has_seeds_of_its_own_and_the_same_ones_again() -> None:
    seeds = []
    for attempt in (1, 1, 2):
        trajectory = Trajectory(ADD, ANSWER)
        await trajectory.run(attempt=attempt)
        seeds.append([call.sampling_params["sampling_seed"] for call in trajectory.calls])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 4


async def test_call_result_answer() -> None:
    trajectory = Trajectory("I add. " + ADD, ANSWER)
    assert await trajectory.run() == Outcome(StopReason.ANSWERED, "3")
    first, second = trajectory.calls
    assert first.tools is not None
    assert (first.parent, second.parent, second.tools) == (None, first.id, None)
    (execution,) = first.tool_executions
    assert (execution.name, execution.result, execution.error) == ("add", "3", False)
    assert first.messages == ({"role": "user", "content": "1+2?"},)
    assert second.messages[0]["execution"] == 0
    assert full_messages(second, first)[0]["content"] == "3"
    assert second.messages[0]["tool_call_id"] == first.response["tool_calls"][0]["id"]
    assert trajectory.statuses == [CallStatus.COMPLETED, CallStatus.COMPLETED]


async def test_the_stored_ids_are_the_prompts_and_outputs_of_the_engine() -> None:
    trajectory = Trajectory(ADD, "hm", FAIL, ANSWER)
    await trajectory.run()
    prompt: list[int] = []
    engine = trajectory.engine
    for call, asked, said in zip(trajectory.calls, engine.prompts, engine.outputs, strict=True):
        prompt += unpack_ids(call.context_ids).tolist()
        assert prompt == asked
        assert call.prompt_tokens == len(asked)
        assert unpack_ids(call.output_ids).tolist() == said
        assert len(call.logprobs) == 4 * len(said)
        prompt += said


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("<tool_call>{oops</tool_call>", "not JSON"),
        ('<tool_call>{"name": "ad", "arguments": {}}</tool_call>', "did you mean 'add'"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "'b' is a required property"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "not a JSON object"),
    ],
)
async def test_a_malformed_call_is_told_to_the_model(said: str, problem: str) -> None:
    trajectory = Trajectory(said, ANSWER)
    assert (await trajectory.run()).final_answer == "3"
    assert trajectory.statuses == [CallStatus.FORMAT_ERROR, CallStatus.COMPLETED]
    told = trajectory.calls[1].messages[0]
    assert told["role"] == "tool"
    assert problem in told["content"]
    assert trajectory.calls[0].error is not None
    assert trajectory.tools.calls == []


ANSWER_INSIDE = '<tool_call>{"name": "add", "arguments": {"a": 1, "note": "<answer>4</answer>"'


@pytest.mark.parametrize(
    "said",
    [
        ANSWER_INSIDE,
        ANSWER_INSIDE + "</tool_call>",
        '<answer>4</answer><tool_call>{"name": "add"</tool_call>',
        "<tool_call><answer>4</answer></tool_call>",
        "<answer>4</answer></tool_call>",
    ],
)
async def test_a_malformed_call_has_no_answer_in_it_or_beside_it(said: str) -> None:
    trajectory = Trajectory(said, ANSWER)
    assert (await trajectory.run()).final_answer == "3"
    assert trajectory.statuses == [CallStatus.FORMAT_ERROR, CallStatus.COMPLETED]
    single = Trajectory(said)
    assert await single.run("single_turn") == Outcome(StopReason.TURNS_LIMIT)
    assert single.statuses == [CallStatus.FORMAT_ERROR]


async def test_a_tools_error_goes_back_to_the_model() -> None:
    trajectory = Trajectory(FAIL, ANSWER)
    await trajectory.run()
    assert trajectory.statuses[0] is CallStatus.TOOL_FAILED
    first, second = trajectory.calls
    assert full_messages(second, first)[0]["content"] == "Error: it broke"


async def test_several_calls_are_run_in_order_and_a_bad_one_does_not_stop_the_others() -> None:
    trajectory = Trajectory(ADD + "<tool_call>x</tool_call>" + FAIL, ANSWER)
    await trajectory.run()
    assert [name for name, _ in trajectory.tools.calls] == ["add", "fail"]
    assert len(trajectory.calls[1].messages) == 3
    assert trajectory.statuses[0] is CallStatus.FORMAT_ERROR
    assert trajectory.rollout.tool_calls == 2


async def test_a_lost_tool_server_ends_the_attempt() -> None:
    trajectory = Trajectory(ADD)
    trajectory.tools.raised = ToolServerError("gone")
    with pytest.raises(ToolServerError):
        await trajectory.run()


async def test_turns_are_limited_by_the_flag_or_the_task() -> None:
    trajectory = Trajectory("a", "b", "c", "d", max_turns=3)
    assert await trajectory.run() == Outcome(StopReason.TURNS_LIMIT)
    assert len(trajectory.calls) == 3
    trajectory = Trajectory("a", "b", "c", "d", max_turns=3, task={"max_turns": 2})
    await trajectory.run()
    assert len(trajectory.calls) == 2


async def test_an_answer_inside_a_thought_does_not_count() -> None:
    trajectory = Trajectory("<think><answer>1</answer></think>wait", ANSWER)
    assert (await trajectory.run()).final_answer == "3"
    assert len(trajectory.calls) == 2


async def test_the_same_text_again_is_a_repetition() -> None:
    trajectory = Trajectory("hm", "hm", "hm", ANSWER)
    assert (await trajectory.run()).stop_reason is StopReason.ANSWERED
    assert trajectory.statuses[:3] == [CallStatus.COMPLETED, CallStatus.REPEAT_ERROR, CallStatus.REPEAT_ERROR]
    trajectory = Trajectory("hm", "hm", "hm", ANSWER, repetition_early_stop_times=3)
    assert await trajectory.run() == Outcome(StopReason.REPETITION)
    assert len(trajectory.calls) == 3


async def test_repetition_may_reset_the_context() -> None:
    flags = {"repetition_early_stop_times": 2, "enable_repetition_compress": True}
    trajectory = Trajectory("hm", "hm", ANSWER, new_context="discard_all_tools", **flags)
    assert (await trajectory.run()).stop_reason is StopReason.ANSWERED
    assert trajectory.rollout.context_resets == 1
    assert [call.parent is None for call in trajectory.calls] == [True, False, True]


async def test_a_full_context_ends_the_trajectory() -> None:
    trajectory = Trajectory(LONG + ADD, LONG, ANSWER, **FULL)
    assert await trajectory.run() == Outcome(StopReason.LENGTH_LIMIT)
    assert len(trajectory.calls) == 1


async def test_a_summary_takes_the_place_of_a_full_context() -> None:
    script = (LONG + ADD, "<think>x</think>1+2 gives 3.", ANSWER)
    trajectory = Trajectory(*script, new_context="discard_all", **FULL)
    assert (await trajectory.run()).final_answer == "3"
    first, summary, last = trajectory.calls
    assert (first.parent, summary.parent, last.parent) == (None, first.id, None)
    assert last.messages == ({"role": "user", "content": f"1+2?\n\n{SUMMARY_HEADING}\n1+2 gives 3."},)
    assert last.tools is not None


async def test_dropping_tool_results_that_leaves_the_context_full_ends_it() -> None:
    trajectory = Trajectory(LONG * 3 + ADD, ANSWER, new_context="discard_all_tools", **FULL)
    assert (await trajectory.run()).stop_reason is StopReason.LENGTH_LIMIT


def test_what_discarding_tools_leaves() -> None:
    roles = ["system", "user", *["assistant", "tool"] * 20]
    messages = [{"role": role, "content": str(place)} for place, role in enumerate(roles)]
    left = without_tools(messages)
    assert [m["role"] for m in left] == ["system", "user", *["assistant"] * 8]
    assert len(without_tools([{"role": "user"}] * 30)) == 30
    assert without_tools(messages[:10]) == [m for m in messages[:10] if m["role"] != "tool"]


async def test_prompts_come_from_the_task_or_the_flags() -> None:
    trajectory = Trajectory(ANSWER, system_prompt="S", query_prompt="Q: {query} {x}")
    await trajectory.run()
    assert [m["content"] for m in trajectory.calls[0].messages] == ["S", "Q: 1+2? {x}"]
    task = {"system_prompt": "T", "query_prompt": "{query}!", "tools": (), "answer_schema": "boxed"}
    trajectory = Trajectory(r"\boxed{3}", system_prompt="S", task=task)
    assert (await trajectory.run()).final_answer == "3"
    assert [m["content"] for m in trajectory.calls[0].messages] == ["T", "1+2?!"]
    assert trajectory.calls[0].tools == ()


async def test_few_shot_messages_precede_the_question_and_are_never_trained() -> None:
    shots = [
        {"role": "user", "content": "0+1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 0, "b": 1}}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "<answer>1</answer>"},
    ]
    row = {"id": "t", "query": "1+2?", "messages": [{"role": "system", "content": "S"}, *shots]}
    task = make_task(row, "train", 1)
    fields = {"messages": task.messages, "system_prompt": task.system_prompt}
    trajectory = Trajectory(ADD, ANSWER, task=fields)
    assert (await trajectory.run()).final_answer == "3"
    roles = [message["role"] for message in trajectory.calls[0].messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert "<answer>1</answer>" in trajectory.engine.chat_format.decode(trajectory.engine.prompts[0])
    assert trained(trajectory) == trajectory.engine.outputs


async def test_single_turn() -> None:
    assert await Trajectory(ANSWER).run("single_turn") == Outcome(StopReason.ANSWERED, "3")
    assert await Trajectory("no").run("single_turn") == Outcome(StopReason.TURNS_LIMIT)


async def test_the_example_agent_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("assets/examples")
    trajectory = Trajectory(ADD, "<answer>4</answer>", ANSWER)
    assert await trajectory.run("custom_agent:second_look") == Outcome(StopReason.ANSWERED, "3")
    trajectory = Trajectory("<answer>4</answer>", "hm", max_turns=2)
    assert await trajectory.run("custom_agent:second_look") == Outcome(StopReason.ANSWERED, "4")


async def test_parameters_of_one_call_are_stored_with_it() -> None:
    trajectory = Trajectory(ANSWER)

    async def cold(rollout: Rollout) -> Outcome:
        await rollout.generate(temperature=0.0)
        return Outcome(StopReason.ANSWERED)

    await trajectory.run()
    await cold(trajectory.rollout)
    await trajectory.rollout.finish()
    assert [call.sampling_params["temperature"] for call in trajectory.calls] == [1.0, 0.0]


async def test_json_that_no_encoder_takes_does_not_end_the_trajectory() -> None:
    huge = 10**30
    arguments = f'{{"a": {huge}, "b": 1, "\\u0000": "\\ud800"}}'
    said = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    trajectory = Trajectory(said, ANSWER)
    assert (await trajectory.run()).stop_reason is StopReason.ANSWERED
    (execution,) = trajectory.calls[0].tool_executions
    assert execution.result == str(huge + 1)
    written = {"a": huge, "b": 1, "\0": "?"}
    assert json.loads(str(execution.arguments)) == written
    assert trajectory.calls[0].message["tool_calls"][0]["function"]["arguments"] == written


@pytest.mark.parametrize("agent", ["react", "single_turn"])
@pytest.mark.parametrize("said", [ANSWER, ADD, "<think>" + ANSWER, "<tool_call>{"])
async def test_a_turn_cut_at_its_length_limit_ends_the_trajectory(said: str, agent: str) -> None:
    trajectory = Trajectory(said + CUT)
    assert await trajectory.run(agent) == Outcome(StopReason.LENGTH_LIMIT)
    assert trajectory.tools.calls == []
    (call,) = trajectory.calls
    assert (call.finish_reason, call.status) == ("length", CallStatus.COMPLETED)


@pytest.mark.parametrize("said", ["<think>I guess " + ANSWER, "<think>I try " + ADD, "a <think>" + ANSWER])
async def test_nothing_in_an_open_thought_is_an_answer_or_a_call(said: str) -> None:
    trajectory = Trajectory(said, "<think>x</think>" + ANSWER)
    assert await trajectory.run() == Outcome(StopReason.ANSWERED, "3")
    assert trajectory.tools.calls == []
    first, second = trajectory.calls
    assert first.response["reasoning_content"] == said.partition("<think>")[2]
    assert "<" not in first.response["content"]
    assert second.response["reasoning_content"] == "x"


async def test_a_thought_that_the_prompt_opens_is_reasoning() -> None:
    trajectory = Trajectory(ANSWER, "no </think>" + ADD, ANSWER + "</think>" + ANSWER.replace("3", "4"))
    trajectory.engine.chat_format = format_of(PLAIN.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"))
    assert await trajectory.run() == Outcome(StopReason.ANSWERED, "4")
    assert [call.response["content"] for call in trajectory.calls] == ["", "", "So it is <answer>4</answer>"]
    assert [name for name, _ in trajectory.tools.calls] == ["add"]
