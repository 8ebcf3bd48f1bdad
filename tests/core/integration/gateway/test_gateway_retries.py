"""Retried, parallel and abandoned requests: one document each, on any gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from gateway_run import GatewayRun
from pymongo.read_concern import ReadConcern
from rollout_fakes import ScriptedEngine, format_of

from agentrl.config.sampling import GatewayConfig
from agentrl.documents.record import GatewayCallStatus
from agentrl.errors import EngineError
from agentrl.inference.engine import Generation
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

BODY = {"model": "policy", "messages": [{"role": "user", "content": "1+2?"}]}


class SlowEngine(ScriptedEngine):
    """Generates its first tokens, then waits until it may go on."""

    def __init__(self, *script: Any) -> None:
        super().__init__(format_of(), *script)
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()

    async def generate(self, *args: Any, **named: Any) -> Generation:
        generation = await super().generate(*args, **named)
        self.began.set()
        await self.may_end.wait()
        return generation


def url_of(run: GatewayRun, gateway: str | None = None) -> str:
    base = run.endpoint.base_url
    return f"{base if gateway is None else gateway + base[base.index('/t/') :]}/chat/completions"


async def post(url: str, body: Any = BODY, **headers: str) -> dict[str, Any]:
    async with httpx2.AsyncClient(timeout=60) as client:
        answer = await client.post(url, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_same_body_or_key_is_one_call_and_a_new_key_another(store: Store) -> None:
    run = GatewayRun(store, "One.", "Two.", "Three.")
    async with run.open(config=GatewayConfig(gateway_port=0, gateway_retry_seconds=600)):
        url = url_of(run)
        first, again = await post(url), await post(url)
        keyed = await post(url, **{"idempotency-key": "k"})
        other_body = {**BODY, "temperature": 0.5}
        keyed_again = await post(url, other_body, **{"idempotency-key": "k"})
    assert first == again
    assert keyed == keyed_again != first
    assert len(await run.calls()) == 2


async def test_the_same_body_later_is_a_new_sample(store: Store) -> None:
    run = GatewayRun(store, "One.", "Two.")
    async with run.open(config=GatewayConfig(gateway_port=0, gateway_retry_seconds=0)):
        first, later = await post(url_of(run)), await post(url_of(run))
    assert first["id"] != later["id"]
    seeds = [call.sampling_params["sampling_seed"] for call in await run.calls()]
    assert len(set(seeds)) == 2


async def test_parallel_calls_on_two_gateways_get_the_next_indexes(store: Store) -> None:
    run = GatewayRun(store, lambda prompt: f"To {prompt.count('x')}.")
    bodies = [{**BODY, "messages": [{"role": "user", "content": "x" * (n + 1)}]} for n in range(12)]
    async with run.open(), run.second_gateway() as second:
        urls = [url_of(run), url_of(run, second)]
        answers = await asyncio.gather(*(post(urls[n % 2], body) for n, body in enumerate(bodies)))
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts == [f"To {n + 1}." for n in range(12)]
    calls = await run.calls()
    assert [call.index for call in calls] == list(range(12))
    record = await run.record()
    assert record.traj == tuple(call.id for call in calls)


async def test_a_retry_at_another_gateway_waits_for_the_first_and_gets_its_answer(store: Store) -> None:
    run = GatewayRun(store, "unused")
    run.engine = slow = SlowEngine("Only once.")
    async with run.open(), run.second_gateway() as second:
        first = asyncio.create_task(post(url_of(run)))
        await slow.began.wait()
        retry = asyncio.create_task(post(url_of(run, second)))
        slow.may_end.set()
        assert await first == await retry
    assert len(slow.outputs) == len(await run.calls()) == 1


async def test_a_client_that_disconnects_leaves_a_call_that_its_retry_gets(store: Store) -> None:
    run = GatewayRun(store, "unused")
    run.engine = slow = SlowEngine("A long answer that nobody reads to its end.")
    body = {**BODY, "stream": True}
    async with run.open():
        async with (
            httpx2.AsyncClient(timeout=60) as client,
            client.stream("POST", url_of(run), json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if '"content":"A' in line:
                    break
        slow.may_end.set()
        async with httpx2.AsyncClient(timeout=60) as client:
            whole = (await client.post(url_of(run), json=body)).text
    assert "[DONE]" in whole
    assert len(slow.outputs) == len(await run.calls()) == 1


async def test_the_call_of_a_gateway_that_died_is_taken_over(store: Store) -> None:
    run = GatewayRun(store, "Here it is.")
    dying = SlowEngine("never sent")
    async with run.open(), run.second_gateway(dying) as second:
        lost = asyncio.create_task(post(url_of(run, second)))
        await dying.began.wait()
        # What is left of a gateway that was killed: its lease, which nobody renews.
        calls = store.database["GatewayCall"].with_options(read_concern=ReadConcern("local"))
        (left,) = await calls.find({}).to_list()
        expired = {"$set": {"expires_at": left["created_at"], "gateway": "killed"}}
        await calls.update_one({"_id": left["_id"]}, expired)
        answer = await post(url_of(run))
        dying.may_end.set()
        with pytest.raises(AssertionError, match="dead_token"):
            await lost
    assert answer["choices"][0]["message"]["content"] == "Here it is."
    assert len(await run.calls()) == 1


async def test_a_failed_call_is_no_document_and_its_retry_starts_again(store: Store) -> None:
    run = GatewayRun(store, EngineError("the engine is gone"), "Back.")
    async with run.open():
        async with httpx2.AsyncClient(timeout=60) as client:
            down = await client.post(url_of(run), json=BODY)
        answer = await post(url_of(run))
    assert (down.status_code, down.json()["error"]["code"]) == (503, "unavailable")
    assert answer["choices"][0]["message"]["content"] == "Back."
    (call,) = await store.database["GatewayCall"].find({}).to_list()
    assert (call["status"], len(await run.calls())) == (GatewayCallStatus.DONE, 1)
