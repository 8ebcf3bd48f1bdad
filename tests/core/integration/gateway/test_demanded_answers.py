"""Requests that demand a tool call, none, or a JSON schema: asked again, and what was chosen is context."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx2
import pytest
from gateway_run import ADD, ADD_TOOL, GatewayRun

from agentrl.data.finalize_group import mask_reason
from agentrl.gateway.answerer import ATTEMPTS
from agentrl.inference.engine import EngineRefusedError
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

ASK = {"model": "policy", "messages": [{"role": "user", "content": "1+2?"}], "tools": [ADD_TOOL]}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
REFUSAL = EngineRefusedError("the local engine does not support sampling parameter 'structural_tag'")
"""What an engine without a grammar answers first."""


async def _answer(run: GatewayRun, **body: Any) -> Any:
    async with run.open() as endpoint, httpx2.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{endpoint.base_url}/chat/completions", json={**ASK, **body})
    if body.get("stream"):
        assert "[DONE]" in answer.text
        return answer.text
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_demanded_call_is_asked_for_again_and_is_context(store: Store, choice: Any) -> None:
    run = GatewayRun(store, REFUSAL, "Three.", "I think three.", ADD, "never asked")
    answer = await _answer(run, tool_choice=choice)
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "add"
    (call,) = await run.calls()
    assert (call.sampling_params["asked_again"], call.error) == (2, None)
    assert mask_reason(call) == "asked_again 2"


async def test_a_first_answer_that_calls_is_trained(store: Store) -> None:
    run = GatewayRun(store, REFUSAL, ADD)
    await _answer(run, tool_choice="required")
    (call,) = await run.calls()
    assert mask_reason(call) is None


async def test_a_stream_holds_back_what_is_not_chosen(store: Store) -> None:
    run = GatewayRun(store, REFUSAL, "Not this.", f"So: {ADD}")
    text = await _answer(run, tool_choice="required", stream=True)
    assert "Not this" not in text
    assert "So:" in text
    assert '"name":"add"' in text


async def test_without_a_call_the_last_answer_is_a_format_error(store: Store) -> None:
    run = GatewayRun(store, REFUSAL, "Three.")
    answer = await _answer(run, tool_choice="required")
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Three.", "stop")
    assert len(run.engine.prompts) == 1 + ATTEMPTS
    (call,) = await run.calls()
    assert call.error == "no tool call, and the request demands one of add"


async def test_a_greedy_answer_is_asked_for_once(store: Store) -> None:
    run = GatewayRun(store, REFUSAL, "Three.")
    await _answer(run, tool_choice="required", temperature=0)
    assert len(run.engine.prompts) == 1 + 1


async def test_no_call_is_answered_where_none_is_allowed(store: Store) -> None:
    run = GatewayRun(store, f"So: {ADD}")
    answer = await _answer(run, tool_choice="none")
    assert "tool_calls" not in answer["message"]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("So:", "stop")
    (call,) = await run.calls()
    assert call.tools == ()
    assert call.error == "a call of add, and the request allows no tool call"


async def test_an_engine_with_a_grammar_gets_the_schema(store: Store) -> None:
    run = GatewayRun(store, '{"sum": 3}')
    answer = await _answer(run, response_format=FORMAT, tools=None)
    assert json.loads(answer["message"]["content"]) == {"sum": 3}
    (call,) = await run.calls()
    assert json.loads(call.sampling_params["json_schema"]) == SCHEMA
    assert str(mask_reason(call)).startswith("json_schema ")  # the fake's logprobs are the policy's


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_an_engine_with_a_grammar_gets_the_shape_of_a_call(store: Store, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    run = GatewayRun(store, ADD)
    await _answer(run, tool_choice=choice, tools=[ADD_TOOL, other])
    (call,) = await run.calls()
    answer = json.loads(call.sampling_params["structural_tag"])["format"]
    schema = ADD_TOOL["function"]["parameters"]
    tag = {
        "type": "tag",
        "begin": '<tool_call>{"name": "add", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}</tool_call>",
    }
    if choice == "required":
        assert answer["type"] == "or"
        assert answer["elements"][0] == tag
        assert answer["elements"][1]["begin"] == '<tool_call>{"name": "other", "arguments": '
    else:
        assert answer == tag
    assert call.error is None


async def test_a_schema_beside_tools_is_a_call_or_json(store: Store) -> None:
    run = GatewayRun(store, '{"sum": 3}')
    await _answer(run, response_format=FORMAT)
    (call,) = await run.calls()
    kinds = json.loads(call.sampling_params["structural_tag"])["format"]["elements"]
    assert [kind["type"] for kind in kinds] == ["tag", "json_schema"]


async def test_an_engine_without_a_grammar_is_asked_again(store: Store) -> None:
    run = GatewayRun(store, REFUSAL, "Three.", '{"sum": "3"}', '{"sum": 3}')
    answer = await _answer(run, response_format=FORMAT, tools=None)
    assert json.loads(answer["message"]["content"]) == {"sum": 3}
    (call,) = await run.calls()
    assert (mask_reason(call), call.error) == ("asked_again 2", None)


async def test_a_field_without_effect_is_logged_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    run = GatewayRun(store, "Three.", "Four.")
    ignored = {"prediction": {"type": "content", "content": "x"}, "reasoning_effort": "high", "shrug": 1}
    with caplog.at_level(logging.WARNING, "agentrl.gateway.dialects.fields"):
        async with run.open() as endpoint, httpx2.AsyncClient(timeout=60) as client:
            for seed in (1, 2):
                body = {**ASK, **ignored, "seed": seed}
                assert (await client.post(f"{endpoint.base_url}/chat/completions", json=body)).is_success
    fields = [json.loads(record.field) for record in caplog.records]  # type: ignore[attr-defined]
    assert sorted(fields) == sorted(ignored)
