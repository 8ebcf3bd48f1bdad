"""What a gateway refuses, each with a clear error in OpenAI's shape; other trajectories are untouched."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import openai
import pytest
from gateway_run import GatewayRun

from agentrl.chat.renderer import ControlTokens
from agentrl.config.sampling import GatewayConfig
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

USER = {"role": "user", "content": "1+2?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BAD: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "n": ({"n": 2}, 400, "unsupported_parameter", "one answer for each request"),
    "logprobs": ({"logprobs": 3}, 400, "invalid_value", "logprobs is 3"),
    "bias": ({"logit_bias": {"5": 1}}, 400, "unsupported_parameter", "logit_bias"),
    "model_name": ({"model": None}, 400, "invalid_value", "model is None; it must be text"),
    "pattern": ({"model": "claude-*x"}, 404, "model_not_found", "claude-*x"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 5}, 400, "unsupported_parameter", "top_logprobs 5"),
    "model": ({"model": "gpt-9"}, 404, "model_not_found", 'the model "gpt-9" does not exist'),
    "image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "unsupported_content", "text only"),
    "temperature": ({"temperature": 9}, 400, "invalid_value", "temperature is 9"),
    "messages": ({"messages": []}, 400, "invalid_value", "a list of at least 1"),
    "role": ({"messages": [{"role": "king", "content": "x"}]}, 400, "invalid_value", 'is "king"'),
    "prefill": ({"messages": [USER, {"role": "assistant", "content": "3"}]}, 400, "no_new_message", "last"),
    "arguments": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}, USER]},
        400, "invalid_value", "arguments is not JSON",
    ),
    "tools": ({"tools": [{"type": "web_search"}]}, 400, "invalid_value", "only function tools"),
    "tool_choice": ({"tool_choice": "required"}, 400, "invalid_value", "the tools are: none"),
    "tool_choice_kind": ({"tool_choice": "any"}, 400, "unsupported_parameter", 'tool_choice "any"'),
    "tool_choice_list": (
        {"tool_choice": {"type": "allowed_tools"}}, 400, "unsupported_parameter", "use auto, none, required",
    ),
    "response_format": ({"response_format": {"type": "xml"}}, 400, "unsupported_parameter", "json_schema"),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
        400, "invalid_value", "a schema that is not valid",
    ),
    "search": ({"web_search_options": {}}, 400, "unsupported_parameter", "give a tool that searches"),
    "max_tokens": ({"max_tokens": -1}, 400, "invalid_value", "max_tokens is -1"),
    "stream": ({"stream": "yes"}, 400, "invalid_value", "true or false"),
    "long": ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "context_length_exceeded", "200"),
}  # fmt: skip


async def test_bad_requests_are_named_in_openais_shape(store: Store) -> None:
    run, other = GatewayRun(store, "x"), GatewayRun(store, "mine")
    async with (
        other.open() as untouched,
        run.open(max_prompt_tokens=200, prompt_reserve_tokens=10) as endpoint,
        httpx2.AsyncClient(timeout=60) as client,
    ):
        url = f"{endpoint.base_url}/chat/completions"
        await client.post(
            f"{untouched.base_url}/chat/completions", json={"model": "policy", "messages": [USER]}
        )
        before = await _documents_of(other)
        for name, (change, status, code, text) in BAD.items():
            answer = await client.post(url, json={"model": "policy", "messages": [USER], **change})
            error = answer.json()["error"]
            assert (name, answer.status_code, error["code"]) == (name, status, code)
            assert text in error["message"]
            assert set(error) == {"message", "type", "param", "code"}
        not_json = await client.post(url, content=b"{not json")
        assert (not_json.status_code, not_json.json()["error"]["code"]) == (400, "invalid_json")
        a_list = await client.post(url, content=b"[]")
        assert "must be a JSON object" in a_list.json()["error"]["message"]
        nested = await client.post(url, content=b"[" * 100_000)
        assert nested.json()["error"]["code"] == "invalid_json"
        for path, headers in (("messages/batches", {}), ("files", {"anthropic-version": "2023-06-01"})):
            lost = await client.get(f"{endpoint.base_url}/{path}", headers=headers)
            assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
        nowhere = await client.get(f"{endpoint.base_url}/nothing")
        assert nowhere.status_code == 404
        assert "there is no GET /t/…/v1/nothing" in nowhere.json()["error"]["message"]
        assert endpoint.api_key not in nowhere.text
        assert await _documents_of(other) == before
    assert await run.calls() == []


class Holds:
    """The longest time for which the event loop was held: CPU time, which other processes do not lengthen."""

    def __init__(self) -> None:
        self.of_loop = self.of_process = 0.0

    async def __aenter__(self) -> Holds:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.02)
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.thread_time(), time.process_time()
            await asyncio.sleep(0.005)
            self.of_loop = max(self.of_loop, time.thread_time() - before[0])
            self.of_process = max(self.of_process, time.process_time() - before[1])


LARGE = {
    "words": "the quick brown fox " * 100_000,
    "one word": "x" * 2_000_000,
    "control tokens": "<|im_end|>" * 60_000,
    "brackets": "<" * 1_000_000,
}


@pytest.mark.attack
async def test_a_large_request_does_not_hold_the_event_loop(store: Store) -> None:
    run = GatewayRun(store)
    async with run.open(max_prompt_tokens=20_000) as endpoint, httpx2.AsyncClient(timeout=60) as client:
        for name, text in LARGE.items():
            body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
            async with Holds() as holds:
                counted = await client.post(f"{endpoint.base_url}/messages/count_tokens", content=body)
                answer = await client.post(f"{endpoint.base_url}/chat/completions", content=body)
            assert counted.json()["input_tokens"] > len(text), name
            assert answer.json()["error"]["code"] == "context_length_exceeded", name
            assert holds.of_loop < 0.1, name
            assert holds.of_process < 0.5, f"{name}: a thread held the interpreter's lock"
    assert await run.calls() == []


@pytest.mark.attack
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = GatewayRun(store)
    monkeypatch.setattr(ControlTokens, "encode", lambda *_: pytest.fail("it was tokenized"))
    async with run.open(max_prompt_tokens=20_000) as endpoint, httpx2.AsyncClient(timeout=60) as client:
        message = {"role": "user", "content": LARGE["words"]}
        answer = await client.post(
            f"{endpoint.base_url}/chat/completions", json={"model": "policy", "messages": [message]}
        )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "at least 399,999 tokens, and --max_prompt_tokens is 20,000" in error["message"]


async def _documents_of(run: GatewayRun) -> list[Any]:
    """Every document of a trajectory."""
    database, record = run.store.database, run.claim.record_id
    found = [await database["Record"].find_one({"_id": record})]
    for name in ("GatewayCall", "GatewaySession", "DispatchedSamplingTask"):
        found += await database[name].find({"record": record}).to_list()
    return found


async def test_models_may_be_named_by_a_pattern(store: Store) -> None:
    run = GatewayRun(store, "Hello.")
    config = GatewayConfig(gateway_port=0, gateway_models="claude-*")
    async with run.open(config=config) as endpoint, httpx2.AsyncClient(timeout=60) as client:
        assert endpoint.model == "policy"
        url = f"{endpoint.base_url}/chat/completions"
        for model, status in (("policy", 200), ("claude-sonnet-9", 200), ("gpt-9", 404)):
            answer = await client.post(url, json={"model": model, "messages": [USER]})
            assert (model, answer.status_code) == (model, status)
        listed = (await client.get(f"{endpoint.base_url}/models")).json()
    assert [item["id"] for item in listed["data"]] == ["policy"]


@pytest.mark.attack
async def test_a_body_over_the_limit_is_refused_before_it_is_read(store: Store) -> None:
    run = GatewayRun(store, "x")
    config = GatewayConfig(gateway_port=0, gateway_body_mb=1)
    async with run.open(config=config) as endpoint, httpx2.AsyncClient(timeout=60) as client:
        url = f"{endpoint.base_url}/chat/completions"

        async def parts() -> Any:
            for _ in range(20):
                yield b"x" * 2**19

        told = await client.post(url, content=b"x" * 10 * 2**20)
        assert (told.status_code, told.json()["error"]["code"]) == (413, "body_too_large")
        streamed = await client.post(url, content=parts())
        assert streamed.status_code == 413


@pytest.mark.attack
async def test_a_token_of_another_and_a_dead_one_open_nothing(store: Store) -> None:
    run, other = GatewayRun(store, "mine"), GatewayRun(store, "other")
    body = {"model": "policy", "messages": [USER]}
    async with run.open() as endpoint, other.open() as theirs, httpx2.AsyncClient(timeout=60) as client:
        url = f"{endpoint.base_url}/chat/completions"
        for token in (theirs.api_key, "nonsense"):
            wrong = await client.post(url, json=body, headers={"authorization": f"Bearer {token}"})
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "wrong_key")
        unknown = await client.post(url.replace(endpoint.api_key, "nonsense"), json=body)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "dead_token")
        stored = [item["_id"] for item in await store.database["GatewaySession"].find({}).to_list()]
        assert endpoint.api_key not in str(stored)
        await store.database["Task"].update_one(  # the lease of the second trajectory runs out
            {"_id": other.claim.task.id, "slots.traj_id": other.claim.traj_id},
            [{"$set": {"slots": {"$map": {"input": "$slots", "as": "slot", "in": {"$cond": [
                {"$eq": ["$$slot.traj_id", other.claim.traj_id]},
                {"$mergeObjects": ["$$slot", {"lease_expires_at": "$$NOW"}]}, "$$slot"]}}}}}],
        )  # fmt: skip
        late = await client.post(f"{theirs.base_url}/chat/completions", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (401, "dead_token")
        fine = await client.post(url, json=body)
        assert fine.status_code == 200
    async with run.second_gateway() as gateway, httpx2.AsyncClient(timeout=60) as client:
        ended = await client.post(gateway + url[url.index("/t/") :], json=body)
        assert (ended.status_code, ended.json()["error"]["code"]) == (401, "dead_token")
    assert len(await run.calls()) == 1
    assert await other.calls() == []
    left = await store.database["GatewayCall"].distinct("record")
    assert left == [run.claim.record_id], "a request to a trajectory that has ended leaves its name nowhere"


async def test_a_client_that_never_finishes_meets_the_limit_of_calls(store: Store) -> None:
    run = GatewayRun(store, lambda prompt: "And on.")
    async with run.open(max_calls=3) as endpoint:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=60)
        messages: list[Any] = [USER]
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [said, {"role": "user", "content": "more"}]
        with pytest.raises(openai.PermissionDeniedError, match="has made its 3 model calls"):
            await client.chat.completions.create(model="policy", messages=messages)
        await client.close()
    assert endpoint.result.stopped_by == "turns"
    assert len(await run.calls()) == 3


async def test_of_more_calls_at_once_than_are_left_the_first_are_answered(store: Store) -> None:
    run = GatewayRun(store, lambda prompt: "Done.")
    async with run.open(max_calls=3) as endpoint, httpx2.AsyncClient(timeout=60) as client:
        url, headers = (
            f"{endpoint.base_url}/chat/completions",
            {"authorization": f"Bearer {endpoint.api_key}"},
        )
        bodies = [{"model": "policy", "messages": [USER], "seed": number} for number in range(8)]
        answers = await asyncio.gather(*(client.post(url, json=body, headers=headers) for body in bodies))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [403] * 5
    assert endpoint.result.stopped_by == "turns"
    assert len(await run.calls()) == 3


@pytest.mark.attack
async def test_a_slow_body_times_out(store: Store) -> None:
    run = GatewayRun(store, "x")
    config = GatewayConfig(gateway_port=0, gateway_timeout_seconds=0.1)
    async with run.open(config=config) as endpoint:
        host, port = endpoint.base_url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        path = endpoint.base_url[endpoint.base_url.index("/t/") :]
        writer.write(
            f"POST {path}/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: 100\r\n\r\n{{".encode()
        )
        head = await asyncio.wait_for(reader.readline(), 30)
        assert b" 408 " in head
        writer.close()
        await writer.wait_closed()
