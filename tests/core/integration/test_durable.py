"""A trajectory goes on in another sampler: after a release, after a death, and with tools that have state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import small_run as run
from db_command import violations
from rollout_fakes import PLAIN, FakeSession, FakeTools, format_of
from test_sampling import ADD, Setting, quick, task
from waiting import cancel, until

from agentrl.documents.document import sanitize_bson
from agentrl.documents.model_call import (
    STEP,
    Event,
    PartialGeneration,
    ToolExecution,
    read_arguments,
    storable_arguments,
)
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus, ToolState
from agentrl.documents.task import Claim
from agentrl.errors import LeaseLostError, SessionLostError, tool_server
from agentrl.store import records as store_records
from agentrl.store.client import Store
from agentrl.tools.tool import OwnSession, ToolResult, TrajectoryInfo

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick", "published")]

__all__ = ["quick"]

TURNS = 4


def steady(prompt: str) -> str:
    """Calls the tool ``TURNS`` times, then answers."""
    return "<answer>3</answer>" if prompt.count("<|im_start|>tool") >= TURNS else ADD


@pytest.fixture
async def published(store: Store, tmp_path: Path) -> None:
    await run.publish(store, tmp_path, 0, step=0, train_step=None)


def sampler(store: Store, **given: Any) -> Setting:
    """A sampler whose engine serves the version that is published."""
    setting = Setting(store, steady, **given)
    setting.engine.version = 0
    return setting


class SlowTools(FakeTools):
    """From call number ``slow`` on, calls wait for ``going``."""

    def __init__(self, slow: int) -> None:
        super().__init__()
        self.slow = slow
        self.waiting = asyncio.Event()
        self.going = asyncio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if len(self.calls) + 1 >= self.slow:
            self.waiting.set()
            await self.going.wait()
        return await super().call(name, arguments)


async def begun(store: Store, slow: int, **given: Any) -> tuple[Setting, Claim, asyncio.Task[bool]]:
    """A trajectory whose owner hangs in tool call number ``slow``, with what came before stored."""
    await store.tasks.load([task("a", slots=1)])
    tools = SlowTools(slow)
    setting = sampler(store, tools=tools, **given)
    claim = await store.claims.claim(split="train", owner="old", lease_seconds=60)
    assert claim is not None
    running = asyncio.create_task(setting.worker.run(claim))
    await tools.waiting.wait()

    async def is_stored() -> bool:
        calls = await store.model_calls.by_record(claim.record_id)
        return len(calls) == slow and all(call.tool_executions for call in calls[:-1])

    for _ in range(200):
        if await is_stored():
            break
        await asyncio.sleep(0.05)
    assert await is_stored()
    return setting, claim, running


async def released(store: Store, slow: int, **given: Any) -> tuple[Setting, Claim]:
    """A trajectory that ``begun`` has begun, and whose owner has given it back."""
    setting, claim, running = await begun(store, slow, **given)
    await cancel(running)
    await store.attempts.release(claim)
    return setting, claim


async def adopted(store: Store) -> Claim:
    """The claim of the next owner of a trajectory that was given back in its third tool call."""
    await released(store, 3)
    claim = await store.claims.claim(split="train", owner="new", lease_seconds=60)
    assert claim is not None
    return claim


async def expire(store: Store, claim: Claim) -> None:
    ends = {"slots.0.lease_expires_at": claim.task.created_at, "lease_deadline": claim.task.created_at}
    await store.database["Task"].update_one({"_id": claim.task.id}, {"$set": ends})


async def only_record(setting: Setting) -> Record:
    (record,) = await setting.records("train/0/a")
    return record


@pytest.mark.parametrize("slow", [1, 3])
async def test_the_next_owner_goes_on_where_the_last_one_seemed_dead(store: Store, slow: int) -> None:
    old, claim, running = await begun(store, slow)
    before = await store.model_calls.by_record(claim.record_id)
    await expire(store, claim)
    new = sampler(store)
    await new.run()
    record = await only_record(new)
    assert (record.id, record.score, record.turns) == (claim.record_id, 1.0, TURNS + 1)
    assert len(new.engine.prompts) == TURNS + 1 - slow
    assert len(new.tools.calls) == TURNS + 1 - slow
    calls = await store.model_calls.by_record(record.id)
    assert calls[: slow - 1] == before[: slow - 1]
    assert [call.output_ids for call in calls[:slow]] == [call.output_ids for call in before]
    assert [call.attempt for call in calls] == [1] * slow + [2] * (TURNS + 1 - slow)
    ownership = record.owners[-1]
    assert (ownership.replayed, ownership.tokens) == (slow, sum(call.generated_tokens for call in before))
    assert await violations(store) == []

    old.tools.going.set()  # it was only slow: nothing that it writes counts
    assert await running is False
    assert await store.model_calls.by_record(record.id) == calls
    assert (await only_record(new)).owners == record.owners
    with pytest.raises(LeaseLostError):
        await store.model_calls.add(claim, calls[0])
    assert await violations(store) == []


async def test_a_template_that_shows_the_time_renders_the_same_for_the_next_owner(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = format_of("{{ strftime_now('%H:%M:%S.%f') }}" + PLAIN)
    await released(store, 3, chat_format=dated)
    new = sampler(store, chat_format=dated)
    await new.run()
    record = await only_record(new)
    assert (record.score, record.owners[-1].replayed, record.owners[-1].diverged_at) == (1.0, 3, None)
    assert len(new.engine.prompts) == TURNS + 1 - 3


async def test_of_two_that_take_over_at_once_one_goes_on_and_an_outside_call_is_made_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSession, "state_of", lambda *_: ToolState.OUTSIDE)
    old, claim, running = await begun(store, 3)
    await expire(store, claim)
    new = [sampler(store) for _ in range(2)]
    await asyncio.gather(*(each.run() for each in new))
    old.tools.going.set()  # stopped in its call, it goes on after the others
    assert await running is False
    record = await only_record(new[0])
    assert (record.score, len(record.owners)) == (1.0, 2)
    assert [len(each.tools.calls) for each in (old, *new)] in ([3, 1, 0], [3, 0, 1])
    calls = await store.model_calls.by_record(record.id)
    results = [call.tool_executions[0].result for call in calls[:-1]]
    assert results[:2] + results[3:] == ["3", "3", "3"]
    assert "may have taken effect" in results[2]
    assert await violations(store) == []


async def test_a_released_trajectory_keeps_what_its_tools_have_done(store: Store) -> None:
    old, _ = await released(store, 3)
    assert (await only_record(old)).status is RecordStatus.RELEASED
    assert await violations(store) == []
    new = sampler(store)
    await new.run()
    record = await only_record(new)
    assert (record.score, [each.ended for each in record.owners]) == (1.0, ["released", None])
    assert len(new.tools.calls) == TURNS - 2
    assert await violations(store) == []


async def test_where_the_agent_goes_another_way_the_old_branch_is_kept_and_not_trained(store: Store) -> None:
    _, claim = await released(store, 4)
    before = await store.model_calls.by_record(claim.record_id)
    await store.database["DispatchedSamplingTask"].update_one(  # as if the template had changed since
        {"_id": before[2].id}, {"$set": {"context_ids": before[1].context_ids + before[2].context_ids}}
    )
    new = sampler(store)
    await new.run()
    record, branch = await new.records("train/0/a")
    assert (record.score, record.turns) == (1.0, TURNS + 1)
    assert (record.owners[-1].diverged_at, record.owners[-1].dropped) == (2, 2)
    assert (branch.attempt, branch.status, branch.turns) == (2, RecordStatus.RELEASED, 4)
    kept = await store.model_calls.by_record(branch.id)
    assert [call.output_ids for call in kept] == [call.output_ids for call in before]
    assert [call.parent for call in kept] == [None, *(call.id for call in kept[:3])]
    calls = await store.model_calls.by_record(record.id)
    assert [call.index for call in calls] == list(range(TURNS + 1))
    assert [call.attempt for call in calls] == [1, 1, 2, 2, 2]
    assert len(new.engine.prompts) == TURNS + 1 - 2
    (used,) = await store.evaluations.tasks("train", "react", 0.5)
    assert used.generated_tokens == record.generated_tokens, "the branch begins with calls of the trajectory"
    assert used.input_tokens == record.input_tokens


class Counting(FakeTools):
    """Each trajectory has a count, which ``add`` answers; ``skew`` makes sessions of another beginning."""

    def __init__(self, *, lose: int | None = None, skew: int = 0) -> None:
        super().__init__()
        self.lose = lose
        self.skew = skew

    @asynccontextmanager
    async def session(
        self, trajectory: TrajectoryInfo, environment: OwnSession | None = None
    ) -> AsyncIterator[FakeSession]:
        yield CountingSession(self, trajectory.servers)


class CountingSession(FakeSession):
    tools: Counting

    def __init__(self, tools: FakeTools, servers: Any) -> None:
        super().__init__(tools, servers)
        self.count = self.tools.skew
        self.tools.skew = 0

    def state_of(self, name: str, server: str | None = None) -> ToolState:
        return ToolState.REPLAY

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        self.tools.calls.append((name, dict(arguments)))
        if self.tools.lose is not None and len(self.tools.calls) == self.tools.lose:
            raise SessionLostError("it is gone", hint="")
        self.count += 1
        return ToolResult(text=f"count {self.count}", error=False, seconds=0.0, server="fake")

    async def replay(self, executions: Any) -> int | None:
        for index, execution in enumerate(executions):
            result = await self.call(execution.name, execution.arguments)
            if result.text != execution.result:
                return index
        return None


def names_its_outage(session: CountingSession) -> None:
    """A lost session is an outage of its server."""
    call = session.call

    async def called(name: str, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            return await call(name, arguments)
        except SessionLostError as error:
            error.outage = tool_server("fake")
            raise

    session.call = called  # type: ignore[method-assign]


@pytest.mark.parametrize(("skew", "most"), [(0, 1), (10, 2), (10, 1)])
async def test_a_lost_session_is_made_again_by_its_calls_or_the_trajectory_begins_anew_or_fails(
    store: Store, skew: int, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_records, "MOST_RESTARTS", most)
    await store.tasks.load([task("a", slots=1)])
    tools = Counting(lose=3)
    init = CountingSession.__init__

    def made(session: CountingSession, *given: Any) -> None:
        init(session, *given)
        names_its_outage(session)

    monkeypatch.setattr(CountingSession, "__init__", made)
    setting = sampler(store, tools=tools)
    running = asyncio.create_task(setting.run())
    await until(lambda: len(tools.calls) >= 3)
    tools.skew = skew
    await running
    records = await setting.records("train/0/a")
    record = records[-1]
    assert await violations(store) == []
    if skew and most == 1:
        assert record.failure is not None
        assert record.failure.kind == "replay"
        assert "add answered a repeated call otherwise" in record.failure.message
        assert "declare its state" in record.failure.message
        return
    assert (record.score, record.turns) == (1.0, TURNS + 1)
    calls = await store.model_calls.by_record(record.id)
    assert [call.tool_executions[0].result for call in calls[:-1]] == [f"count {n + 1}" for n in range(TURNS)]
    (slot,) = (await store.tasks.find("train"))[0].slots
    assert slot.attempt - slot.released == 1
    if skew:
        assert [each.status for each in records[:-1]] == [RecordStatus.RELEASED]
        assert [each.ended for each in records[0].owners] == ["released", "restarted"]
        assert "begins anew" in caplog.text
    else:
        assert len(records) == 1
        assert len(tools.calls) == TURNS + 1 + 2  # the lost one, and two again


async def test_a_signal_that_ends_the_tools_does_not_let_a_trajectory_begin_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = await adopted(store)
    setting = sampler(store)

    async def replay(*_: object) -> int:
        setting.worker.stop.set()
        return 0

    monkeypatch.setattr(FakeSession, "replay", replay)
    with pytest.raises(asyncio.CancelledError):
        await setting.worker.run(new)
    assert await store.claims.heartbeat([new], 60) == []
    await store.attempts.release(new)
    (slot,) = (await store.tasks.find("train"))[0].slots
    assert (slot.begun, slot.restarts) == (1, 0)
    assert [each.ended for each in (await only_record(setting)).owners] == ["released", "released"]


async def test_what_a_tool_adds_while_a_branch_is_dropped_is_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = await adopted(store)
    await store.records.create(new)
    calls = await store.model_calls.by_record(new.record_id)
    late = replace(calls[1], revision=9, tool_executions=calls[1].tool_executions * 2)
    transaction, is_added = store.connection.transaction, False

    async def after_the_tool(write: Any) -> Any:
        nonlocal is_added
        if not is_added:
            is_added = True
            await store.model_calls.add(new, late, new_executions=[1])
        return await transaction(write)

    monkeypatch.setattr(store.connection, "transaction", after_the_tool)
    assert await store.model_calls.drop(new, 2) == 1
    record = await store.records.get(new.record_id)
    assert record is not None
    assert (record.turns, record.tool_calls) == (2, 3)
    kept = await store.model_calls.by_record(f"train/0/a/0/{new.attempt}")
    assert [len(call.tool_executions) for call in kept] == [1, 2, 0]


async def test_a_partial_answer_is_used_up_by_the_call_that_it_began(store: Store) -> None:
    await store.tasks.load([task("a", slots=1)])
    claim = await run.claim(store)
    partial = PartialGeneration(
        prompt="x", output_ids=b"", logprobs=b"", logprobs_of="policy", versions=(), cached_tokens=0
    )
    await store.records.keep(claim, partial=partial)
    await store.model_calls.add(claim, run.call(claim, 0, 0, 2))
    record = await store.records.get(claim.record_id)
    assert record is not None
    assert record.partial is None


async def test_answers_of_an_environment_may_be_larger_than_a_document(store: Store) -> None:
    await store.tasks.load([task("a", slots=1)])
    claim = await run.claim(store)
    event = Event(
        name=STEP, arguments="?", result={"text": "x" * 2**20}, started_at=claim.task.created_at, seconds=0.0,
        attempt=1,
    )  # fmt: skip
    call = replace(run.call(claim, 0, 0, 2), events=(event,) * 20)
    await store.model_calls.add(claim, call)
    (stored,) = await store.model_calls.by_record(claim.record_id)
    assert stored.events == call.events
    assert await violations(store) == []


async def test_a_tool_that_ends_long_after_the_last_owner_is_no_late_write(store: Store) -> None:
    _, claim = await released(store, 2)
    long_ago = {f"owners.0.{name}": datetime.now(UTC) - timedelta(hours=1) for name in ("since", "until")}
    await store.database["Record"].update_one({"_id": claim.record_id}, {"$set": long_ago})
    times = {"created_at": long_ago["owners.0.since"]}
    await store.database["DispatchedSamplingTask"].update_many(
        {}, {"$set": times, "$unset": {"checksums": 1}}, bypass_document_validation=True
    )
    new = sampler(store)
    await new.run()
    assert (await only_record(new)).score == 1.0
    assert [each for each in await violations(store) if "OWNERS" in str(each)] == []


@pytest.mark.parametrize("value", [{"$ref": "#/a", "$id": 1}, {"$id": 1}, {"a\0b": "c\0d"}, 10**20])
async def test_arguments_of_a_model_and_values_of_an_agent_come_back_as_they_were(
    store: Store, value: Any
) -> None:
    await store.tasks.load([task("a", slots=1)])
    claim = await run.claim(store)
    given = storable_arguments({"a": value})
    execution = ToolExecution(name="$a.b", arguments=given, result="", error=False, seconds=0.0, attempt=1)
    answer = sanitize_bson(
        [{"$id": 1, "$ref": "a"}, {"$ref": "#/a"}, {"$set": {"a.b": 1}}, {"": 1}, math.inf]
    )
    event = Event(name="$a.b", result=answer, started_at=claim.task.created_at, seconds=0.0, attempt=1)
    call = run.call(claim, 0, 0, 2)
    for revision in range(2):
        call = replace(call, tool_executions=(execution,), events=(event,), revision=revision)
        await store.model_calls.add(claim, call, new_executions=[1 - revision])
        (stored,) = await store.model_calls.by_record(claim.record_id)
        assert read_arguments(stored.tool_executions[0].arguments) == {"a": value}
        assert (stored.tool_executions, stored.events) == (call.tool_executions, call.events)


async def test_parallel_calls_of_earlier_owners_spend_the_time_that_they_took_together(store: Store) -> None:
    await released(store, 2)
    await store.database["DispatchedSamplingTask"].update_many({}, {"$set": {"generate_seconds": 3000.0}})
    new = sampler(store)
    await new.run()
    assert (await only_record(new)).score == 1.0
