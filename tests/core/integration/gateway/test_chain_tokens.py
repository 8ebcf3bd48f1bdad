"""A client of 20 calls and its title cost training the tokens of the same conversation by ``react``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from chat_models import KEEPS_ALL
from gateway_run import answerer_of, gateway_task, worker_of
from rollout_fakes import FakeTools, ScriptedEngine, format_of

from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import to_training_data
from agentrl.data.forest import forest_from_data
from agentrl.documents.status import StopReason
from agentrl.documents.training import DBRecordData
from agentrl.gateway.app import GatewayHost
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import react
from agentrl.rollout.rollout import Rollout
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

CALLS = 20
TITLE = "Give this conversation a title."


def script() -> Callable[[str], str]:
    """Add 19 times, then answer; a title is asked for at any time."""
    count = iter(range(CALLS))

    def say(prompt: str) -> str:
        if TITLE in prompt:
            return "Sums"
        number = next(count)
        if number == CALLS - 1:
            return "<answer>3</answer>"
        call = {"name": "add", "arguments": {"a": number, "b": 2}}
        return f"Sum {number}.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"

    return say


def harness(train: str) -> Callable[[Rollout], Any]:
    """A client of its own loop, tools and title."""

    async def run(rollout: Rollout) -> Outcome:
        tools: Any = FakeTools().list()
        messages: list[Any] = list(rollout.first_messages)
        async with (
            rollout.gateway(train=train) as endpoint,
            openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client,
        ):
            complete = client.chat.completions.create
            title = [{"role": "system", "content": TITLE}, *messages]
            await complete(model=endpoint.model, messages=title)
            while True:
                answer = await complete(model=endpoint.model, messages=messages, tools=tools)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return Outcome(StopReason.ANSWERED, message.content)
                for call in message.tool_calls:
                    given = json.loads(call.function.arguments)
                    text = str(given["a"] + given["b"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    return run


async def trained(store: Store, agent: Any, name: str) -> tuple[DBRecordData, int]:
    """Return the training data of a trajectory, and the tokens of all its prompts and answers."""
    flags: dict[str, Any] = {"max_turns": 50, "max_prompt_tokens": 100_000, "prompt_reserve_tokens": 100}
    engine = ScriptedEngine(format_of(KEEPS_ALL), script())
    host = GatewayHost(answerer_of(store, engine, **flags), GatewayConfig())
    worker = worker_of(store, engine, agent, host, **flags)
    task = gateway_task(name, slots=1)
    await store.tasks.load([task])
    claim = await store.claims.claim(split="train", owner="me", lease_seconds=600)
    assert claim is not None
    try:
        await worker.run(claim)
    finally:
        await host.close()
    record = await store.records.get(claim.record_id)
    assert record is not None
    assert record.failure is None, record.failure.message
    calls = await store.model_calls.by_record(record.id)
    data = to_training_data(task, record, calls, 0.5, GroupConfig())
    assert data is not None
    return data, sum(call.prompt_tokens + call.generated_tokens for call in calls)


async def test_a_client_of_20_calls_trains_in_one_chain_as_cheap_as_react(store: Store) -> None:
    by_react, _ = await trained(store, react, "react")
    main, unmerged = await trained(store, harness("main"), "main")
    everything, _ = await trained(store, harness("all"), "all")
    assert by_react.turns == CALLS
    assert (len(main.nodes), len(main.spans)) == (1, CALLS)
    assert main.trainable_tokens == by_react.trainable_tokens
    forests = [
        forest_from_data([data], vocab_size=None, ages={3: 0}) for data in (by_react, main, everything)
    ]
    tokens = [forest.tokens for forest in forests]
    assert tokens[1] <= 1.05 * tokens[0]
    assert unmerged > 8 * tokens[1]
    assert (len(everything.nodes), len(everything.spans)) == (2, CALLS + 1)
    assert tokens[2] <= 1.05 * tokens[0] + everything.nodes[0].end
