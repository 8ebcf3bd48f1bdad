"""OpenAI's own client against the Responses API of a real gateway."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway_run import ADD, ADD_TOOL, GatewayRun
from rollout_fakes import CUT, PLAIN, ScriptedEngine, format_of

from agentrl.rollout.agent_io import Endpoint
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

TOOL: Any = {"type": "function", "strict": False, **ADD_TOOL["function"]}  # type: ignore[dict-item]
ASK: dict[str, Any] = {"model": "policy", "instructions": "Be short.", "tools": [TOOL]}


def client_of(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=60)


def outputs_of(items: Any) -> list[Any]:
    found = []
    for item in items:
        if item.type == "function_call":
            given = json.loads(item.arguments)
            output = str(given["a"] + given["b"])
            found.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
    return found


async def ask(client: openai.AsyncOpenAI, streams: bool, **more: Any) -> Any:
    if not streams:
        return await client.responses.create(**ASK, **more)
    async with client.responses.stream(**ASK, **more) as stream:
        return await stream.get_final_response()


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_loop_is_one_chain(store: Store, streams: bool, by_id: bool) -> None:
    run = GatewayRun(store, "<think>I need it.</think>I add. " + ADD, "It is 3.")
    items: list[Any] = [{"role": "user", "content": "1+2?"}]
    async with run.open() as endpoint, client_of(endpoint) as client:
        answer = await ask(client, streams, input=items)
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        results = outputs_of(answer.output)
        if by_id:
            answer = await ask(client, streams, input=results, previous_response_id=answer.id)
        else:
            echoed = [item.model_dump(exclude_none=True) for item in answer.output]
            answer = await ask(client, streams, input=[*items, *echoed, *results])
    assert (answer.output_text, answer.status) == ("It is 3.", "completed")
    assert answer.usage.output_tokens == len(run.engine.outputs[1])
    first, second = await run.calls()
    assert second.parent == first.id
    assert [message["role"] for message in second.messages] == ["tool"]


async def test_text_is_streamed_and_a_cut_answer_is_incomplete(store: Store) -> None:
    run = GatewayRun(store, "A few words of text." + CUT)
    async with run.open() as endpoint, client_of(endpoint) as client:
        stream = await client.responses.create(model="policy", input="1+2?", stream=True)
        events = [event async for event in stream]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "A few words of text."
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"


async def test_tools_that_only_openai_runs_are_left_out_and_named(store: Store) -> None:
    run = GatewayRun(store, "No tool is needed." + CUT)
    tools: list[Any] = [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "files", "tools": []},
        {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}},
    ]
    async with run.open() as endpoint, client_of(endpoint) as client:
        answer = await client.responses.create(model="policy", input="1+2?", tools=tools)
        stream = await client.responses.create(model="policy", input="1+3?", tools=tools, stream=True)
        events = [event async for event in stream]
    note = {"tools_left_out": "web_search, custom:apply_patch, namespace:files"}
    assert answer.metadata == note
    assert [event.response.metadata for event in (events[0], events[-1])] == [note, note]
    (call, *_) = await run.calls()
    assert [tool["function"]["name"] for tool in call.tools or ()] == ["add"]


async def test_the_messages_of_the_system_that_codex_sends_are_one_to_the_model(store: Store) -> None:
    takes_one = "{%- for m in messages %}{% if m.role == 'system' and not loop.first %}"
    takes_one += "{{- raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    run = GatewayRun(store, "unused")
    run.engine = ScriptedEngine(format_of(takes_one + PLAIN), "I add. " + ADD, "It is 3.")
    items: list[Any] = [
        {"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in [("developer", "You code."), ("developer", "Skills."), ("user", "1+2?")]
    ]
    async with run.open() as endpoint, client_of(endpoint) as client:
        answer = await ask(client, True, input=items)
        echoed = [item.model_dump(exclude_none=True) for item in answer.output]
        answer = await ask(client, True, input=[*items, *echoed, *outputs_of(answer.output)])
    assert answer.output_text == "It is 3."
    begins = "<|im_start|>system\nBe short.\n\nYou code.\n\nSkills.<|im_end|>\n<|im_start|>user\n1+2?"
    assert run.engine.chat_format.decode(run.engine.prompts[0]).startswith(begins)
    first, second = await run.calls()
    assert second.parent == first.id
    assert [message["content"] for message in first.messages] == ["Be short.", "You code.", "Skills.", "1+2?"]


async def test_bad_requests_are_named_in_openais_shape(store: Store) -> None:
    run = GatewayRun(store, "x")
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"input": image}, "reads text only"),
        ({"input": []}, "a list of at least 1"),
        ({"previous_response_id": "resp_none"}, "names no answer of this trajectory"),
        ({"model": "gpt-9"}, "does not exist"),
        ({"background": True}, "not queued"),
        ({"text": {"format": {"type": "grammar"}}}, "json_schema with a schema"),
        ({"tools": [{"name": "web_search"}]}, "only function tools"),
    ]
    async with run.open() as endpoint, client_of(endpoint) as client:
        for change, text in bad:
            with pytest.raises(openai.APIStatusError, match=text):
                await client.responses.create(**{"model": "policy", "input": "1+2?", **change})
    assert await run.calls() == []
