"""A later owner's client starts again: requests that equal stored ones get their answers, in any dialect."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from db_command import violations
from gateway_run import ADD, ADD_TOOL, answerer_of, gateway_task
from rollout_fakes import ScriptedEngine, format_of

from agentrl.base.concurrency import end_tasks
from agentrl.calls.prompts import chain_of
from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import to_training_data
from agentrl.documents.record import GatewayCall, Record
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim
from agentrl.errors import LeaseLostError
from agentrl.gateway.app import GatewayHost
from agentrl.inference.engine import Generation
from agentrl.rollout.agent_io import Endpoint
from agentrl.scoring.scorers import stored_context
from agentrl.store.client import Store
from agentrl.store.gateways import CallRequest

pytestmark = pytest.mark.integration

Json = dict[str, Any]


class Owner:
    """A sampler that owns the trajectory, with a gateway and an engine of its own."""

    def __init__(self, store: Store, *script: str | Callable[[str], str]) -> None:
        self.store = store
        self.engine = ScriptedEngine(format_of(), *script)
        self.host = GatewayHost(answerer_of(store, self.engine), GatewayConfig(gateway_retry_seconds=60.0))
        self.claim: Claim
        self.endpoint: Endpoint

    @asynccontextmanager
    async def open(self, *, max_calls: int = 50, **given: Any) -> AsyncIterator[Owner]:
        """Claim the trajectory and serve it; it is complete behind the block."""
        await self._claim()
        try:
            async with self.host.open(self.claim, train="main", max_calls=max_calls, **given) as endpoint:
                self.endpoint = endpoint
                yield self
        finally:
            await self.host.close()
        await self.store.records.advance(self.claim, RecordStatus.COMPLETED)

    @asynccontextmanager
    async def open_and_die(self, **given: Any) -> AsyncIterator[Owner]:
        """Claim the trajectory and serve it; behind the block its lease has run out."""
        is_lost = False
        try:
            async with self.open(**given):
                yield self
                await self.lose()
        except LeaseLostError:
            is_lost = True
        assert is_lost

    async def lose(self) -> None:
        """End the lease, and let another owner take the slot over and give it up, unless one has."""
        if await self.store.claims.heartbeat([self.claim], 0.0):
            return
        taken = await self.store.claims.claim(split="train", owner="between", lease_seconds=600)
        assert taken is not None
        await self.store.attempts.release(taken)

    async def _claim(self) -> None:
        claim = await self.store.claims.claim(split="train", owner=f"owner {id(self)}", lease_seconds=600)
        assert claim is not None
        await self.store.records.create(claim)
        await self.store.records.advance(claim, RecordStatus.RUNNING)
        self.claim = claim

    async def send(self, path: str, body: Json, **headers: str) -> httpx2.Response:
        async with httpx2.AsyncClient(timeout=60) as client:
            return await client.post(f"{self.endpoint.base_url}/{path}", json=body, headers=headers)

    async def chat(self, messages: list[Json], **more: Any) -> Json:
        """The message that answers a conversation; it is appended."""
        answer = await self.send("chat/completions", {"model": "policy", "messages": messages, **more})
        assert answer.status_code == 200, answer.text
        message: Json = answer.json()["choices"][0]["message"]
        messages.append(message)
        return message

    async def record(self) -> Record:
        record = await self.store.records.get(self.claim.record_id)
        assert record is not None
        return record


@pytest.fixture
async def store_with_task(store: Store) -> Store:
    await store.tasks.load([gateway_task(slots=1)])
    return store


async def add_up(owner: Owner, turns: int, *, tools: Json | None = None, start: str = "1+2?") -> list[Json]:
    """A loop that answers tool calls, as a program would; it sends what it has so far."""
    messages: list[Json] = [{"role": "user", "content": start}]
    for turn in range(turns):
        answer = await owner.chat(messages, tools=[tools or ADD_TOOL])
        results = {"role": "tool", "content": str(turn)}
        messages += [{**results, "tool_call_id": call["id"]} for call in answer.get("tool_calls", ())]
    return messages


async def test_a_later_owner_gets_the_stored_answers_and_goes_on(store_with_task: Store) -> None:
    store = store_with_task
    async with Owner(store, f"I add.{ADD}").open_and_die() as old:
        before = await add_up(old, 3)
    new = Owner(store, "3")
    async with new.open(max_calls=5):
        messages = await add_up(new, 3)
        assert messages == before
        assert new.engine.outputs == []
        assert (await new.chat(messages, tools=[ADD_TOOL]))["content"] == "3"
    record = await new.record()
    calls = await store.model_calls.by_record(record.id)
    assert [call.attempt for call in calls] == [1, 1, 1, 3]
    assert [call.parent for call in calls] == [None, *(call.id for call in calls[:3])]
    assert (record.turns, record.untrained_calls, record.dropped_calls) == (4, (), ())
    first, _, last = record.owners
    assert (first.ended, last.replayed, last.diverged_at, last.dropped) == ("lease", 3, None, 0)
    assert last.tokens == sum(call.generated_tokens for call in calls[:3])
    data = to_training_data(new.claim.task, replace(record, score=1.0), calls, 0.5, GroupConfig())
    assert data is not None
    assert len(data.nodes) == 1
    assert data.trainable_tokens == record.generated_tokens


async def test_answers_that_come_back_do_not_read_the_whole_trajectory_each(
    store_with_task: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with_task
    async with Owner(store, f"I add.{ADD}").open_and_die() as old:
        before = await add_up(old, 6)
    new = Owner(store, "3")
    read: list[int] = []
    by_record = store.model_calls.by_record

    async def counted(record_id: str) -> Any:
        calls = await by_record(record_id)
        read.append(len(calls))
        return calls

    async with new.open():
        monkeypatch.setattr(store.model_calls, "by_record", counted)
        messages = await add_up(new, 6)
        assert messages == before
        assert (await new.chat(messages, tools=[ADD_TOOL]))["content"] == "3"
        assert read == []
        monkeypatch.undo()
    calls = await store.model_calls.by_record(new.claim.record_id)
    assert [call.parent for call in calls] == [None, *(call.id for call in calls[:-1])]
    whole = chain_of({call.id: call for call in calls}, calls[-1].id)
    kept = await new.host._app.answerer.prompts.chains.get(new.claim.record_id, calls[-1].id)
    assert replace(whole, encoded=None) == replace(kept, encoded=None)


async def test_a_stored_answer_is_sent_as_its_new_request_wants_it(store_with_task: Store) -> None:
    store = store_with_task
    asked: list[tuple[str, Json]] = [
        ("chat/completions", {"messages": [{"role": "user", "content": "A"}]}),
        ("messages", {"messages": [{"role": "user", "content": "B"}], "max_tokens": 99}),
        ("responses", {"input": "C"}),
    ]
    whole = {"stream": True, "stream_options": {"include_usage": True}}
    async with Owner(store, f"<think>\nHm.\n</think>\n\nI add.{ADD}").open_and_die() as old:
        # The temperature makes two requests of each: the first is streamed now, the second later.
        streamed = [await old.send(path, {"model": "policy", **body, **whole}) for path, body in asked]
        plain = [
            await old.send(path, {"model": "policy", **body, "temperature": 0.9}) for path, body in asked
        ]
        await old.chat([{"role": "user", "content": "D"}])
    new = Owner(store, "never")
    async with new.open():
        for (path, body), stream, answer in zip(asked, streamed, plain, strict=True):
            again = await new.send(path, {"model": "policy", **body})
            assert said(again.text) == said(stream.text)
            again = await new.send(path, {"model": "policy", **body, "temperature": 0.9, **whole})
            assert said(again.text) == said(answer.text)
        body = {"model": "policy", "messages": [{"role": "user", "content": "D"}], "logprobs": True}
        again = await new.send("chat/completions", body)
    assert {each["logprob"] for each in again.json()["choices"][0]["logprobs"]["content"]} == {-0.5}
    assert new.engine.outputs == []


def said(body: str) -> set[str]:
    """What an answer says: thought, text, tool, arguments, why it ended, and what it took."""
    plain = body.replace('\\"', '"').replace('": ', '":')
    words = ("Hm.", "I add", '"add"', '"a":1', "tool_calls", "tool_use", "completed", '"total_tokens":')
    found = {word for word in words if word in plain}
    assert len(found) >= 5, body
    return found | set(re.findall(r'"(?:prompt|input|completion|output)_tokens":[1-9]\d*', plain))


async def test_text_that_the_patterns_match_does_not_count(store_with_task: Store) -> None:
    store, volatile = store_with_task, [r"Today is \S+", r"session [0-9a-f]+"]
    async with Owner(store, ADD).open_and_die(volatile=volatile) as old:
        await add_up(old, 2, start="Today is Monday. In session 1f: 1+2?")
    new = Owner(store, "3")
    async with new.open(volatile=volatile):
        messages = await add_up(new, 2, start="Today is Tuesday. In session 99: 1+2?")
        assert new.engine.outputs == []
        await new.chat(messages, tools=[ADD_TOOL])
    calls = await store.model_calls.by_record(new.claim.record_id)
    # The last call goes on from the ids that were sampled on Monday.
    assert [call.parent for call in calls] == [None, calls[0].id, calls[1].id]
    assert "Monday" in new.engine.chat_format.decode(new.engine.prompts[0])


async def test_what_is_not_asked_for_again_is_dropped(store_with_task: Store) -> None:
    store = store_with_task
    async with Owner(store, ADD, "to the left", "left again", "and left").open_and_die() as old:
        messages = await add_up(old, 1)
        for word in ("a", "b", "c"):
            await old.chat([*messages, {"role": "user", "content": word}], tools=[ADD_TOOL])
    new = Owner(store, "to the right", "and on")
    async with new.open():
        messages = await add_up(new, 1)
        messages.append({"role": "user", "content": "other"})
        await new.chat(messages, tools=[ADD_TOOL])
        await new.chat([*messages, {"role": "user", "content": "more"}], tools=[ADD_TOOL])
    record = await new.record()
    calls = await store.model_calls.by_record(record.id)
    assert (record.dropped_calls, record.untrained_calls, record.turns) == ((1, 2, 3), (1, 2, 3), 3)
    tokens = [call.generated_tokens for call in calls]
    assert (record.dropped_tokens, record.generated_tokens) == (sum(tokens[1:4]), tokens[0] + sum(tokens[4:]))
    assert (record.stored_calls, len(record.traj), record.prompt_tokens) == (6, 6, calls[-1].prompt_tokens)
    counts = [f"what='{name}'" for name in ("turns", "generated_tokens", "min_version", "max_version")]
    assert [each for each in await violations(store) if any(name in each for name in counts)] == []
    last = record.owners[-1]
    assert (last.replayed, last.diverged_at, last.dropped) == (1, 1, 3)
    assert [message["content"] for message in new.endpoint.result.messages][-1] == "and on"
    context = stored_context(new.claim.task, record, calls, "")
    assert context.messages[-1]["content"] == "and on"
    assert [call.dropped for call in context.calls] == [False, True, True, True, False, False]


async def test_equal_requests_get_their_answers_once_and_in_order(store_with_task: Store) -> None:
    store = store_with_task
    body = {"model": "policy", "messages": [{"role": "user", "content": "draw"}]}
    numbers = iter(range(100))

    async def draw(owner: Owner, key: str | None = None) -> str:
        answer = await owner.send("chat/completions", body, **({"idempotency-key": key} if key else {}))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async with Owner(store, lambda prompt: f"{next(numbers)}").open_and_die() as old:
        assert [await draw(old, key) for key in ("a", "b", "a", "c")] == ["0", "1", "0", "2"]
    new = Owner(store, lambda prompt: f"{next(numbers)}")
    async with new.open(max_calls=5):
        assert [await draw(new, key) for key in ("x", "y", "x", "y")] == ["0", "1", "0", "1"]
        # Without keys: the next one is not a retry while a stored answer is left, and then it is.
        assert [await draw(new) for _ in range(2)] == ["2", "2"]
        assert [await draw(new, key) for key in ("z", "w")] == ["3", "4"]
        over = await new.send("chat/completions", body, **{"idempotency-key": "v"})
        assert (over.status_code, over.json()["error"]["code"]) == (403, "turns_limit")
    third = await new.record()
    assert (third.turns, third.dropped_calls) == (5, ())


async def test_a_stored_answer_is_taken_by_one_request_and_again_by_the_same(store_with_task: Store) -> None:
    store = store_with_task
    async with Owner(store, "0", "1").open_and_die() as old:
        for key in ("a", "b"):
            body = {"model": "policy", "messages": [{"role": "user", "content": "draw"}]}
            await old.send("chat/completions", body, **{"idempotency-key": key})
    stored = [GatewayCall.from_document(item) async for item in store.database["GatewayCall"].find({})]
    asked = [replace(stored[0], id=f"new {n}", attempt=3) for n in range(3)]
    # A gateway that dies after it has taken an answer leaves it to the one that takes the request over.
    taken = [await store.gateways.take_earlier(asked[n], str(stored[0].key)) for n in (0, 1, 0, 1, 2)]
    assert [None if call is None else call.call for call in taken] == [
        stored[0].call, stored[1].call, stored[0].call, stored[1].call, None,
    ]  # fmt: skip
    request = CallRequest(
        record=stored[0].record, attempt=3, digest="d.3", dialect="chat", answer_id="a", gateway="g",
        has_key=True,
    )  # fmt: skip
    begun = await store.gateways.begin_first(request, 15.0)
    assert begun is not None
    for _ in range(2):  # the second as after an outage
        await store.gateways.replay(begun, stored[0])
    with pytest.raises(LeaseLostError):
        await store.gateways.replay(replace(begun, gateway="other"), stored[0])


async def test_a_body_that_was_sent_twice_is_not_taken_for_its_retry(store_with_task: Store) -> None:
    store = store_with_task
    old = Owner(store, "0", "1")
    old.host = GatewayHost(answerer_of(store, old.engine), GatewayConfig(gateway_retry_seconds=0.0))
    asked = {"role": "user", "content": "draw"}
    async with old.open_and_die():
        assert [(await old.chat([asked]))["content"] for _ in range(2)] == ["0", "1"]
    new = Owner(store, "2")
    async with new.open():
        assert [(await new.chat([asked]))["content"] for _ in range(3)] == ["0", "1", "1"]


async def test_parallel_conversations_get_their_answers_in_any_order(store_with_task: Store) -> None:
    store = store_with_task

    async def talk(owner: Owner, name: str, delay: float) -> str:
        messages: list[Json] = [{"role": "user", "content": f"I am {name}"}]
        for _ in range(3):
            await asyncio.sleep(delay)
            await owner.chat(messages)
            messages.append({"role": "user", "content": "go on"})
        return json.dumps(messages)

    def say(prompt: str) -> str:
        return f"{prompt.count('go on')} of {prompt[prompt.index('I am') :][:6]}"

    names = [f"{number}" for number in range(6)]
    async with Owner(store, say).open_and_die() as old:
        before = await asyncio.gather(*(talk(old, name, 0.002 * int(name)) for name in names))
    new = Owner(store, "never")
    async with new.open():
        after = await asyncio.gather(*(talk(new, name, 0.01 - 0.002 * int(name)) for name in names))
        assert new.engine.outputs == []
    assert after == before
    assert (await new.record()).owners[-1].replayed == 18


async def test_deaths_on_the_way_to_where_the_program_was_are_not_at_one_entry(
    store_with_task: Store,
) -> None:
    store = store_with_task
    for turns, status in (
        (2, "open"), (0, "open"), (1, "open"), (2, "open"), (2, "open"), (1, "open"), (1, "open"),
        (1, "failed"),
    ):  # fmt: skip
        owner, is_lost = Owner(store, ADD), False
        try:
            async with owner.open():
                await add_up(owner, turns)
                await store.claims.heartbeat([owner.claim], 0.0)
                assert await store.expired_leases.reap("train") == 1
        except LeaseLostError:
            is_lost = True
        task = await store.tasks.get(owner.claim.task.id)
        assert task is not None
        assert (is_lost, task.slots[0].status) == (True, status)
    assert (await owner.record()).turns == 2


async def test_a_program_that_saved_its_conversation_goes_on_from_it(store_with_task: Store) -> None:
    store = store_with_task
    async with Owner(store, ADD).open_and_die() as old:
        saved = await add_up(old, 3)
    new = Owner(store, "3")
    async with new.open():
        await new.chat(saved, tools=[ADD_TOOL])
    record = await new.record()
    assert (record.dropped_calls, record.owners[-1].replayed, len(new.engine.outputs)) == ((), 3, 1)


class SlowEngine(ScriptedEngine):
    """Waits in a generation until it may end."""

    def __init__(self) -> None:
        super().__init__(format_of(), "late")
        self.began, self.may_end = asyncio.Event(), asyncio.Event()

    async def generate(self, *args: Any, **named: Any) -> Generation:
        self.began.set()
        await self.may_end.wait()
        return await super().generate(*args, **named)


async def test_the_request_of_an_owner_that_lost_its_lease_is_not_stored(store_with_task: Store) -> None:
    store = store_with_task
    old = Owner(store)
    old.engine = slow = SlowEngine()
    old.host = GatewayHost(answerer_of(store, slow), GatewayConfig())
    new = Owner(store, "in time")
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+2?"}]}
    async with old.open_and_die():
        late = asyncio.create_task(old.send("chat/completions", body))
        await slow.began.wait()
        await old.lose()
        async with new.open():
            assert (await new.chat([{"role": "user", "content": "1+2?"}]))["content"] == "in time"
            slow.may_end.set()
            assert (await late).json()["error"]["code"] == "dead_token"
    (call,) = await store.model_calls.by_record(new.claim.record_id)
    assert (call.attempt, call.response["content"]) == (3, "in time")


async def test_an_owner_that_gives_up_drops_nothing_and_a_reward_is_reported_again(
    store_with_task: Store,
) -> None:
    store = store_with_task
    async with Owner(store, ADD).open_and_die() as old:
        await add_up(old, 3)
        reward = f"{old.endpoint.root_url}/reward"
        async with httpx2.AsyncClient(headers={"x-api-key": old.endpoint.reward_key or ""}) as client:
            assert (await client.post(reward, json={"score": 1.0})).status_code == 200
    given_up, asked = Owner(store, "never"), asyncio.Event()

    async def run() -> None:
        async with given_up.open():
            await add_up(given_up, 1)
            asked.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(run())
    await asked.wait()
    await end_tasks(running)
    record = await given_up.record()
    assert (record.dropped_calls, record.owners[-1].replayed, record.reported_reward) == ((), 1, None)
    await store.attempts.release(given_up.claim)
    new = Owner(store, "never")
    async with new.open():
        await add_up(new, 3)
    record = await new.record()
    assert (record.dropped_calls, [owner.replayed for owner in record.owners]) == ((), [0, 0, 1, 3])
