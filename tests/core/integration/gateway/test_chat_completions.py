"""OpenAI's own client against a real gateway: answers, streams, tools, branches, and the token tree."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_run import ADD, ADD_TOOL, GatewayRun
from openai import AsyncOpenAI
from rollout_fakes import CUT

from agentrl.documents.model_call import unpack_ids
from agentrl.rollout.agent_io import Endpoint
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

HELLO = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+2?"}]


def client_of(endpoint: Endpoint) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=60)


async def solve(client: AsyncOpenAI, **more: Any) -> list[Any]:
    """Run an ordinary tool loop; return its messages."""
    messages: list[Any] = [*HELLO]
    while True:
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[ADD_TOOL], **more
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return messages
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            result = {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])}
            messages.append(result)


async def test_a_tool_loop_is_one_chain_that_goes_on_from_the_sampled_ids(store: Store) -> None:
    run = GatewayRun(store, "I add. " + ADD, "It is 3.")
    async with run.open() as endpoint, client_of(endpoint) as client:
        messages = await solve(client, temperature=0.7)
    assert messages[-1]["content"] == "It is 3."
    first, second = await run.calls()
    assert (first.parent, second.parent) == (None, first.id)
    assert [unpack_ids(call.output_ids).tolist() for call in (first, second)] == run.engine.outputs
    whole = [*unpack_ids(first.context_ids), *run.engine.outputs[0], *unpack_ids(second.context_ids)]
    assert whole == run.engine.prompts[1]
    assert [message["role"] for message in second.messages] == ["tool"]
    assert {call.sampling_params["temperature"] for call in (first, second)} == {0.7}
    assert {span.version for call in (first, second) for span in call.versions} == {run.engine.version}
    assert endpoint.result.messages[-1]["content"] == "It is 3."
    record = await run.record()
    assert (record.train_rule, record.untrained_calls, record.turns) == ("main", (), 2)
    data = await run.converted()
    ids = unpack_ids(data.input_ids).tolist()
    assert [ids[span.start : span.end] for span in data.spans] == run.engine.outputs
    assert {span.temperature for span in data.spans} == {0.7}


async def test_a_stream_sends_text_as_it_comes_and_calls_at_the_end(store: Store) -> None:
    run = GatewayRun(store, "<think>Hm, adding.</think>I will add now. " + ADD)
    async with run.open() as endpoint, client_of(endpoint) as client:
        stream = await client.chat.completions.create(
            model="policy", messages=HELLO, tools=[ADD_TOOL], stream=True,  # type: ignore[arg-type]
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    texts = [delta.content for delta in deltas if delta.content]
    thoughts = [str((delta.model_extra or {}).get("reasoning_content") or "") for delta in deltas]
    assert ("".join(texts), "".join(thoughts)) == ("I will add now.", "Hm, adding.")
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.function is not None
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == len(run.engine.outputs[0])
    (stored,) = await run.calls()
    assert stored.response["reasoning_content"] == "Hm, adding."


async def test_a_stream_and_its_continuation_are_one_chain(store: Store) -> None:
    run = GatewayRun(store, "<think>So.</think> First.", "Second.")
    async with run.open() as endpoint, client_of(endpoint) as client:
        messages: list[Any] = [*HELLO]
        for more in ("And?", "Thanks."):
            said = await streamed(client, messages)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]
    first, second = await run.calls()
    assert second.parent == first.id


async def streamed(client: AsyncOpenAI, messages: list[Any]) -> str:
    stream: AsyncIterator[Any] = await client.chat.completions.create(
        model="policy", messages=messages, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def test_edits_compaction_and_side_calls_are_branches_that_main_leaves_out(store: Store) -> None:
    run = GatewayRun(store, lambda prompt: f"Answer {len(run.engine.prompts)}.")
    async with run.open() as endpoint, client_of(endpoint) as client:

        async def ask(*messages: Any, **more: Any) -> Any:
            answer = await client.chat.completions.create(
                model="policy", messages=list(messages), **more
            )  # fmt: skip
            return {"role": "assistant", "content": answer.choices[0].message.content}

        def user(text: str) -> Any:
            return {"role": "user", "content": text}

        title = [{"role": "system", "content": "Write a title."}, user("1+2?")]
        await ask(*title)
        chat: list[Any] = [*HELLO]
        for number in range(3):
            chat += [await ask(*chat), user(f"next {number}")]
        await ask(*chat[:4], user("another question"))  # behind the first answer
        await ask(*HELLO, {"role": "assistant", "content": "edited"}, user("so?"))
        await ask(*HELLO, tools=[ADD_TOOL])
    calls = await run.calls()
    parents = [None if call.parent is None else int(call.parent.rpartition("/")[2]) for call in calls]
    assert parents == [None, None, 1, 2, 1, None, None]
    record = await run.record()
    assert record.untrained_calls == (0, 4, 5, 6)
    data = await run.converted()
    assert sorted({span.call for span in data.spans}) == [1, 2, 3]
    assert data.untrained_calls == record.untrained_calls


async def test_the_rule_agent_trains_an_agent_that_compacts_before_and_after_it(store: Store) -> None:
    run = GatewayRun(store, lambda prompt: f"Answer {len(run.engine.prompts)}.")
    async with run.open(train="agent") as endpoint, client_of(endpoint) as client:
        chat: list[Any] = [*HELLO]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=chat)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            chat += [said, {"role": "user", "content": "more"}]
        title = [{"role": "system", "content": "Write a title."}, HELLO[1]]
        compacted = [HELLO[0], {"role": "user", "content": "So far: 3. Go on."}]
        for messages in (title, compacted):
            await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
    record = await run.record()
    assert (record.train_rule, record.untrained_calls) == ("agent", (2,))


async def test_without_parallel_calls_the_first_is_answered_and_the_others_are_an_error(store: Store) -> None:
    run = GatewayRun(store, ADD + ADD, "3.")
    async with run.open() as endpoint, client_of(endpoint) as client:
        messages = await solve(client, parallel_tool_calls=False)
    assert len(messages[2]["tool_calls"]) == 1
    first, second = await run.calls()
    assert second.parent == first.id
    assert first.error is not None
    assert first.error.startswith("2 tool calls, and the request allows one")


def only_the_last(branches: Any) -> list[int]:
    return [branches[-1].indexes[-1]]


@pytest.mark.parametrize(("train", "left_out"), [("all", ()), ("test_chat_completions:only_the_last", (0,))])
async def test_a_rule_chooses_the_trained_branches(store: Store, train: str, left_out: Any) -> None:
    run = GatewayRun(store, "One.", "Two.")
    async with run.open(train=train) as endpoint, client_of(endpoint) as client:
        await streamed(client, [*HELLO])
        await streamed(client, [{"role": "user", "content": "a title"}])
    record = await run.record()
    assert (record.train_rule, record.untrained_calls) == (train, left_out)


async def test_parameters_within_limits_are_honoured_and_recorded(store: Store) -> None:
    run = GatewayRun(store, "It is long" + CUT, "Until STOP here.", "Logged.")
    async with run.open() as endpoint, client_of(endpoint) as client:
        cut = await client.chat.completions.create(
            model="policy", messages=HELLO, max_tokens=7, top_p=0.9, seed=5  # type: ignore[arg-type]
        )  # fmt: skip
        stopped = await client.chat.completions.create(model="policy", messages=HELLO, stop=["STOP"])  # type: ignore[arg-type]
        logged = await client.chat.completions.create(model="policy", messages=HELLO, logprobs=True)  # type: ignore[arg-type]
    assert cut.choices[0].finish_reason == "length"
    assert (stopped.choices[0].finish_reason, stopped.choices[0].message.content) == ("stop", "Until ")
    content = logged.choices[0].logprobs.content if logged.choices[0].logprobs else None
    assert content is not None
    assert len(content) == len(run.engine.outputs[2])
    assert "".join(item.token for item in content) == "Logged."
    first, second, _ = await run.calls()
    given = {name: first.sampling_params[name] for name in ("max_new_tokens", "top_p", "sampling_seed")}
    assert given == {"max_new_tokens": 7, "top_p": 0.9, "sampling_seed": 5}
    assert second.sampling_params["stop"] == ["STOP"]


async def test_models_lists_the_policy(store: Store) -> None:
    run = GatewayRun(store, "x")
    async with run.open() as endpoint, client_of(endpoint) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
