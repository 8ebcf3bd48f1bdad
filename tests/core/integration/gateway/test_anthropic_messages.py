"""Anthropic's own client against a real gateway: answers, streams, tools, counting, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from gateway_run import ADD, ADD_TOOL, GatewayRun

from agentrl.documents.model_call import unpack_ids
from agentrl.rollout.agent_io import Endpoint
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

FUNCTION: Any = ADD_TOOL["function"]
TOOL: Any = {
    "name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"],
}  # fmt: skip
ASK: dict[str, Any] = {"model": "policy", "max_tokens": 100, "system": "Be short.", "tools": [TOOL]}


def client_of(endpoint: Endpoint) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=endpoint.root_url, api_key=endpoint.api_key, max_retries=0, timeout=60
    )


def results_of(blocks: Any) -> list[Any]:
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] + block.input["b"])}
        for block in blocks
        if block.type == "tool_use"
    ]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_loop_is_one_chain(store: Store, streams: bool) -> None:
    run = GatewayRun(store, "<think>I need it.</think>I add. " + ADD + ADD, "It is 3.")
    messages: list[Any] = [{"role": "user", "content": "1+2?"}]
    async with run.open() as endpoint, client_of(endpoint) as client:
        while True:
            if streams:
                async with client.messages.stream(messages=messages, **ASK) as stream:
                    answer: Any = await stream.get_final_message()
            else:
                answer = await client.messages.create(messages=messages, **ASK)
            messages.append({"role": "assistant", "content": answer.content})
            results = results_of(answer.content)
            if not results:
                break
            assert answer.stop_reason == "tool_use"
            assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert answer.content[0].thinking == "I need it."
            messages.append({"role": "user", "content": results})
    assert (answer.content[0].text, answer.stop_reason) == ("It is 3.", "end_turn")
    first, second = await run.calls()
    assert second.parent == first.id
    assert [message["role"] for message in second.messages] == ["tool", "tool"]
    whole = [*unpack_ids(first.context_ids), *run.engine.outputs[0], *unpack_ids(second.context_ids)]
    assert whole == run.engine.prompts[1]
    usage = answer.usage
    assert usage.output_tokens == len(run.engine.outputs[1])
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(run.engine.prompts[1])


async def test_text_is_streamed_as_it_comes(store: Store) -> None:
    run = GatewayRun(store, "A few words of text.")
    async with (
        run.open() as endpoint,
        client_of(endpoint) as client,
        client.messages.stream(
            model="policy", max_tokens=100, messages=[{"role": "user", "content": "?"}]
        ) as stream,
    ):
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == final.content[0].text == "A few words of text."  # type: ignore[union-attr]


async def test_tokens_are_counted_as_a_call_would_have_them(store: Store) -> None:
    run = GatewayRun(store, "One.", "Two.")
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+2?"}]}]
    async with run.open() as endpoint, client_of(endpoint) as client:
        given = {key: value for key, value in ASK.items() if key != "max_tokens"}
        for _ in range(2):
            counted = await client.messages.count_tokens(messages=messages, **given)
            answer = await client.messages.create(messages=messages, **ASK)
            assert counted.input_tokens == len(run.engine.prompts[-1])
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "?"}]
        assert [model.id async for model in client.models.list()] == ["policy"]
    assert len(await run.calls()) == 2


async def test_one_trajectory_may_speak_two_dialects(store: Store) -> None:
    import openai

    run = GatewayRun(store, "One.", "Two.")
    async with run.open() as endpoint, client_of(endpoint) as client:
        plain: Any = [{"role": "user", "content": "1+2?"}]
        await client.messages.create(model="policy", max_tokens=50, messages=plain)
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as other:
            more = [{"role": "assistant", "content": "One."}, {"role": "user", "content": "?"}]
            await other.chat.completions.create(model="policy", messages=[*plain, *more])
    first, second = await run.calls()
    assert second.parent == first.id


BAD: dict[str, tuple[dict[str, Any], type[anthropic.APIStatusError], str]] = {
    "model": ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "AAAA"}}]}]},
        anthropic.BadRequestError, "invalid_request_error",
    ),
    "tool": (
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        anthropic.BadRequestError, "invalid_request_error",
    ),
    "choice": (
        {"tool_choice": {"type": "tool", "name": "x"}},
        anthropic.BadRequestError, "invalid_request_error",
    ),
    "servers": (
        {"extra_body": {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}},
        anthropic.BadRequestError, "invalid_request_error",
    ),
    "long": (
        {"messages": [{"role": "user", "content": "x" * 900}]},
        anthropic.BadRequestError, "invalid_request_error",
    ),
}  # fmt: skip


async def test_bad_requests_are_named_in_anthropics_shape(store: Store) -> None:
    run = GatewayRun(store, "x")
    plain = {**ASK, "messages": [{"role": "user", "content": "1+2?"}]}
    async with (
        run.open(max_prompt_tokens=800, prompt_reserve_tokens=10) as endpoint,
        client_of(endpoint) as client,
    ):
        for change, error, kind in BAD.values():
            with pytest.raises(error) as caught:
                await client.messages.create(**{**plain, **change})
            body: Any = caught.value.body
            assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert "prompt is too long" in body["error"]["message"]
        wrong = anthropic.AsyncAnthropic(base_url=endpoint.root_url, api_key="another", max_retries=0)
        async with wrong:
            with pytest.raises(anthropic.AuthenticationError, match="not that of this URL"):
                await wrong.messages.create(**plain)
    assert await run.calls() == []
