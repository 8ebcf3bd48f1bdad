"""Agents that are clients of their trajectory's gateway, run by a worker: rewards, limits, failures."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import httpx2
import openai
import pytest
from gateway_run import answerer_of, gateway_task, worker_of
from rollout_fakes import PLAIN, ScriptedEngine, format_of
from waiting import cancel

from agentrl.config.sampling import GatewayConfig
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.gateway.app import GatewayHost
from agentrl.rollout.agent_io import Endpoint, Outcome
from agentrl.rollout.rollout import Rollout
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def run_agent(store: Store, agent: Any, *script: Any, **flags: Any) -> Any:
    """Run one trajectory of ``agent``; return its Record."""
    engine = ScriptedEngine(format_of(), *script)
    host = GatewayHost(answerer_of(store, engine, **flags), GatewayConfig())
    worker = worker_of(store, engine, agent, host, **flags)
    await store.tasks.load([gateway_task(slots=1)])
    claim = await store.claims.claim(split="train", owner="me", lease_seconds=600)
    assert claim is not None
    try:
        await worker.run(claim)
    finally:
        await host.close()
    return await store.records.get(claim.record_id)


async def ask(endpoint: Endpoint, messages: list[Any]) -> Any:
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        return await client.chat.completions.create(model=endpoint.model, messages=messages)


async def chatty(rollout: Rollout) -> Outcome:
    """Ask for ever."""
    messages: list[Any] = list(rollout.first_messages)
    async with rollout.gateway() as endpoint:
        while True:
            answer = await ask(endpoint, messages)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [said, {"role": "user", "content": "more"}]


async def once(rollout: Rollout) -> Outcome:
    """Ask once; the answer is final."""
    async with rollout.gateway() as endpoint:
        answer = await ask(endpoint, list(rollout.first_messages))
    assert [message["role"] for message in rollout.messages] == ["user", "assistant"]
    return Outcome(StopReason.ANSWERED, answer.choices[0].message.content)


async def rewarded(rollout: Rollout) -> Outcome:
    """Ask twice and report a reward."""
    async with rollout.gateway(train="all") as endpoint:
        first = await ask(endpoint, list(rollout.first_messages))
        await ask(endpoint, [{"role": "user", "content": "another"}])
        reward = {"score": 0.75, "call_rewards": {first.id: 0.5}, "details": {"judge": "me"}}
        async with httpx2.AsyncClient(timeout=60) as client:
            url = f"{endpoint.root_url}/reward"
            for key in ({}, {"authorization": f"Bearer {endpoint.api_key}"}, {"x-api-key": "guess"}):
                refused = await client.post(url, json={"score": 9.0}, headers=key)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "wrong_key")
            client.headers["authorization"] = f"Bearer {endpoint.reward_key}"
            bad = await client.post(url, json={"score": "high"})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "score")
            unknown = await client.post(url, json={"score": 1, "call_rewards": {"chatcmpl-no": 1}})
            assert unknown.status_code == 400
            assert (await client.post(url, json=reward)).status_code == 200
    return Outcome(StopReason.ANSWERED, "wrong")


async def test_the_tasks_scorer_scores_what_a_client_answered(store: Store) -> None:
    record = await run_agent(store, once, "3")
    assert (record.status, record.score, record.turns) == (RecordStatus.SCORED, 1.0, 1)
    assert record.score_details["scorer"] == "exact"


async def test_a_reported_reward_is_the_score_and_no_scorer_runs(store: Store) -> None:
    record = await run_agent(store, rewarded, "One.", "Two.")
    assert record.score == 0.75
    details = record.score_details
    assert (details["scorer"], details["judge"], details["turn_rewards"]) == ("agent", "me", [0.5, 0.0])


async def test_a_client_at_the_limit_of_calls_ends_at_its_turns_limit(store: Store) -> None:
    record = await run_agent(store, chatty, lambda prompt: "And.", max_turns=3)
    assert (record.stop_reason, record.turns, record.score) == (StopReason.TURNS_LIMIT, 3, 0.0)


async def test_a_conversation_that_no_longer_fits_ends_at_its_length_limit(store: Store) -> None:
    limits = {"max_prompt_tokens": 150, "prompt_reserve_tokens": 10, "max_turns": 99}
    record = await run_agent(store, chatty, lambda prompt: "And so on.", **limits)
    assert record.stop_reason is StopReason.LENGTH_LIMIT
    assert record.turns >= 2


async def test_a_client_that_raises_fails_its_attempt_and_its_calls_stay(store: Store) -> None:
    async def raising(rollout: Rollout) -> Outcome:
        async with rollout.gateway() as endpoint:
            await ask(endpoint, list(rollout.first_messages))
            raise ValueError("my bug")

    record = await run_agent(store, raising, "x")
    assert (record.status, record.turns) == (RecordStatus.FAILED, 1)
    assert "ValueError: my bug" in record.failure.message


async def test_a_template_that_shows_the_time_shows_that_of_the_own_trajectory(store: Store) -> None:
    """The server of a gateway begins in the context of the first one."""
    dated = format_of("{{ strftime_now('%H:%M:%S.%f') }}|" + PLAIN)
    engine = ScriptedEngine(dated, "3")
    host = GatewayHost(answerer_of(store, engine), GatewayConfig())
    worker = worker_of(store, engine, once, host)
    await store.tasks.load([gateway_task(slots=2)])
    for _ in range(2):
        claim = await store.claims.claim(split="train", owner="o", lease_seconds=600)
        assert claim is not None
        assert await worker.run(claim)
    await host.close()
    first, second = (dated.decode(prompt).partition("|")[0] for prompt in engine.prompts)
    assert first < second


async def test_what_an_agent_asked_once_is_the_same_for_the_next_owner(store: Store) -> None:
    """No model call takes it: a gateway, maybe of another process, stores them."""
    numbers = count(1)
    waiting, stamps = asyncio.Event(), []

    async def stamped(rollout: Rollout) -> Outcome:
        early = await rollout.once("stamp", lambda: next(numbers))
        async with rollout.gateway() as endpoint:
            late = await rollout.once("stamp", lambda: next(numbers))
            stamps.append((early, late))
            await ask(endpoint, [{"role": "user", "content": f"{early} {late}"}])
            if not waiting.is_set():
                waiting.set()
                await asyncio.Event().wait()
        return Outcome(StopReason.ANSWERED, "3")

    engine = ScriptedEngine(format_of(), "3")
    host = GatewayHost(answerer_of(store, engine), GatewayConfig())
    worker = worker_of(store, engine, stamped, host)
    await store.tasks.load([gateway_task(slots=1)])
    for owner in ("old", "new"):
        claim = await store.claims.claim(split="train", owner=owner, lease_seconds=600)
        assert claim is not None
        running = asyncio.create_task(worker.run(claim))
        if owner == "old":
            await asyncio.wait_for(waiting.wait(), 60)
            await cancel(running)
            await store.attempts.release(claim)
    assert await running
    await host.close()
    assert stamps == [(1, 2), (1, 2)]
    assert next(numbers) == 3
    (record,) = await store.records.by_task("train/0/t")
    assert [event.result for event in record.events] == [1, 2]
    assert (record.turns, record.dropped_calls) == (1, ())


async def test_a_rollout_calls_the_model_in_one_way_only(store: Store) -> None:
    async def both(rollout: Rollout) -> Outcome:
        async with rollout.gateway():
            await rollout.generate()
        return Outcome(StopReason.ANSWERED)

    record = await run_agent(store, both, "x")
    assert "through its gateway" in record.failure.message
