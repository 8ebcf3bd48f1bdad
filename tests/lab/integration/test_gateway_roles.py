"""Roles of a trajectory through its gateway: a base URL each, branches and rewards of their own."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from db_command import violations
from gateway_run import answerer_of, gateway_task, worker_of
from rollout_fakes import ScriptedEngine, format_of

from agentrl.config.sampling import GatewayConfig
from agentrl.documents.status import StopReason
from agentrl.gateway.app import GatewayHost
from agentrl.rollout.agent_io import Endpoint, Outcome
from agentrl.rollout.rollout import Rollout
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def ask(endpoint: Endpoint, messages: list[Any]) -> list[Any]:
    """Ask once; return the conversation with the answer."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
    return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def both(rollout: Rollout) -> Outcome:
    """The same first message from two roles, then each goes on; the solver also leaves a side branch."""
    async with rollout.gateway() as endpoint:
        solver, critic = endpoint.role("solver"), endpoint.role("the critic")
        mine, theirs = await ask(solver, [user("1+2?")]), await ask(critic, [user("1+2?")])
        await ask(solver, [user("a title")])
        mine = await ask(solver, [*mine, user("sure?")])
        await ask(critic, [*theirs, user("why?")])
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {endpoint.reward_key}"}) as client:
            reward = {"score": 1.0, "role_rewards": {"solver": 1.0, "the critic": 0.25}}
            url = f"{endpoint.root_url}/reward"
            bad = await client.post(url, json={"score": 1.0, "role_rewards": {"a.b": 1.0}})
            assert (bad.status_code, "a role is named" in bad.text) == (400, True)
            assert (await client.post(url, json=reward)).status_code == 200
            key = {"authorization": f"Bearer {endpoint.api_key}"}
            url = f"{endpoint.root_url}/role/a.b/v1/chat/completions"
            bad = await client.post(url, json={}, headers=key)
            assert (bad.status_code, "a role is named" in bad.text) == (400, True)
    return Outcome(StopReason.ANSWERED, mine[-1]["content"])


async def test_each_role_has_a_chain_and_a_reward_of_its_own(store: Store) -> None:
    engine = ScriptedEngine(format_of(), "3", "2?", "Sums", "yes", "because")
    engine.version = 0
    host = GatewayHost(answerer_of(store, engine), GatewayConfig())
    worker = worker_of(store, engine, both, host)
    await store.tasks.load([gateway_task(slots=1)])
    claim = await store.claims.claim(split="train", owner="me", lease_seconds=600)
    try:
        assert await worker.run(claim)
    finally:
        await host.close()
    calls = await store.model_calls.by_record(claim.record_id)
    first = claim.record_id
    assert [(call.role, call.parent) for call in calls] == [
        ("solver", None), ("the critic", None), ("solver", None), ("solver", f"{first}/0"),
        ("the critic", f"{first}/1"),
    ]  # fmt: skip
    record = await store.records.get(claim.record_id)
    assert record.failure is None
    assert record.untrained_calls == (2,), "the rule main applies to each role"
    assert record.role_rewards == {"solver": 1.0, "the critic": 0.25}
    assert record.call_roles == ("solver", "the critic", "solver", "solver", "the critic")
    assert (record.final_answer, record.context_resets) == ("yes", 0)
    assert [found for found in await violations(store) if "Record" in found or "Sampling" in found] == []
