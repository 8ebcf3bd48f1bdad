"""A trajectory that misbehaves fails alone, by name: the sampler goes on, and the others are scored."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import small_run as run
from db_command import violations
from test_sampling import Setting, task

from agentrl.columns import pool as pool_module
from agentrl.documents.model_call import ToolExecution
from agentrl.documents.record import Failure, Record
from agentrl.documents.status import RecordStatus, StopReason, TaskStatus
from agentrl.errors import StoreError
from agentrl.rollout import housekeeping
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import agent
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

MEGABYTES_17 = 17 * 2**20


@pytest.fixture(autouse=True)
async def begun(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published version, and a sampler that looks for work often."""
    monkeypatch.setattr(pool_module, "FIRST_POLL_SECONDS", 0.05)
    monkeypatch.setattr(housekeeping, "HOUSEKEEPING_SECONDS", 0.1)
    await run.publish(store, tmp_path, 0, step=0, train_step=None)


@agent("bad_agent")
async def bad_agent(rollout: Rollout) -> Any:
    """Misbehaves as the task's ``meta`` says, after a model call."""
    await rollout.generate()
    match rollout.task.meta["does"]:
        case "no outcome":
            return None
        case "a number":
            return Outcome(StopReason.ANSWERED, 3)  # type: ignore[arg-type]
        case "a reason":
            return Outcome("bored")  # type: ignore[arg-type]
        case "surrogate":
            raise ValueError("\udcff")
        case "long":
            raise ValueError("x" * MEGABYTES_17)
        case "secret":
            raise ValueError("https://h/mcp?token=abc, mongodb://u:abc@h")
        case "exit":
            sys.exit(1)
        case "exit in a task":
            await asyncio.gather(asyncio.to_thread(sys.exit, 1), asyncio.sleep(0))
        case "interrupt":
            raise KeyboardInterrupt
        case "cancelled":
            raise asyncio.CancelledError
        case "cancels its task":
            own = asyncio.current_task()
            own.cancel()
            await asyncio.sleep(0)
        case "messages":
            rollout.append_messages(["hello"])  # type: ignore[list-item]
        case "large answer":
            return Outcome(StopReason.ANSWERED, "x" * MEGABYTES_17)
    return Outcome(StopReason.ANSWERED, "3")


BAD_AGENTS = {
    "no outcome": ("trajectory", "agent bad_agent returned None"),
    "a number": ("trajectory", "returned the final answer 3"),
    "a reason": ("trajectory", "returned the stop reason 'bored'"),
    "surrogate": ("internal", "agent bad_agent raised ValueError: ?"),
    "long": ("internal", "more characters]"),
    "secret": ("internal", "https://h/mcp?token=***, mongodb://***@h"),
    "exit": ("internal", "raised SystemExit: 1"),
    "exit in a task": ("internal", "SystemExit: 1"),
    "interrupt": ("internal", "raised KeyboardInterrupt"),
    "cancelled": ("internal", "raised CancelledError"),
    "cancels its task": ("internal", "raised CancelledError"),
    "messages": ("trajectory", "a message is 'hello'"),
    "large answer": ("internal", "records: advance"),
}


@scorer("bad_scorer")
async def bad_scorer(context: ScorerContext) -> Any:
    """Misbehaves as the task's ``meta`` says."""
    match context.meta["does"]:
        case "cancelled":
            raise asyncio.CancelledError
        case "not a number":
            return float("nan")
        case "text":
            return "good"
        case "no mapping":
            return ScoreResult(1.0, ["a"])  # type: ignore[arg-type]
        case "large details":
            return ScoreResult(1.0, {"reply": "x" * MEGABYTES_17})
    raise AssertionError


BAD_SCORERS = {
    "cancelled": ("scorer", "scorer bad_scorer raised CancelledError"),
    "not a number": ("scorer", "returned nan"),
    "text": ("scorer", "returned 'good'"),
    "no mapping": ("scorer", "which is not a mapping"),
    "large details": ("internal", "attempts: score"),
}


@scorer("odd_scorer")
async def odd_scorer(context: ScorerContext) -> ScoreResult:
    """Gives details that BSON cannot hold as they are."""
    nested: Any = "deep"
    for _ in range(200):
        nested = [nested]
    return ScoreResult(1.0, {"set": {1}, "big": 2**70, "object": object(), "\0": "\udcff", "nested": nested})


async def record_of(store: Store, task_id: str) -> Record:
    (record,) = await store.records.by_task(task_id)
    return record


async def test_each_fails_alone_and_the_others_are_scored(store: Store) -> None:
    good = [f"good{number}" for number in range(4)]
    tasks = [task(name, slots=1) for name in good]
    tasks += [
        task(f"agent {does}", slots=1, agent_name="bad_agent", meta={"does": does}) for does in BAD_AGENTS
    ]
    tasks += [
        task(f"scorer {does}", slots=1, scorer="bad_scorer", meta={"does": does}) for does in BAD_SCORERS
    ]
    tasks += [task("scorer exit", slots=1, scorer="sys:exit"), task("odd", slots=1, scorer="odd_scorer")]
    await store.tasks.load(tasks)
    setting = Setting(store, "<answer>3</answer>", claims={"max_attempts": 1})
    setting.engine.version = 0
    await setting.run()
    assert setting.sampler.scored == len(good) + 1
    for name in (*good, "odd"):
        assert (await record_of(store, f"train/0/{name}")).score == 1.0
    expected = {f"agent {does}": failure for does, failure in BAD_AGENTS.items()}
    expected |= {f"scorer {does}": failure for does, failure in BAD_SCORERS.items()}
    expected["scorer exit"] = ("scorer", "scorer sys:exit: raised SystemExit")
    for name, (kind, message) in expected.items():
        record = await record_of(store, f"train/0/{name}")
        assert record.status is RecordStatus.FAILED, name
        assert record.failure.kind == kind, (name, record.failure.message[:300])
        assert message in record.failure.message, name
        assert len(record.failure.message) < 9000
        assert record.turns == 1, "the model call of a failed trajectory is stored"
    details = (await record_of(store, "train/0/odd")).score_details
    assert (details["set"], details["big"], details["\ufffd"]) == ([1], str(2**70), "?")
    assert await store.tasks.any_with_status("train", TaskStatus.RUNNING, TaskStatus.WAITING) is False
    assert await violations(store) == []


async def test_one_score_that_cannot_be_encoded_fails_alone(store: Store) -> None:
    """Eight scores are written together: seven are stored whatever the eighth holds."""
    await run.add_task(store, "train/0/g", 0, generations=8)
    claims = [await run.claim(store) for _ in range(8)]
    for claim in claims:
        for status in (RecordStatus.COMPLETED, RecordStatus.SCORING):
            await store.records.advance(claim, status, stop_reason=StopReason.ANSWERED)
    details: list[dict[str, Any]] = [{"scorer": "s"} for _ in claims]
    for bad in ({1}, 2**70, "\udcff", object()):
        details[3] = {"scorer": "s", "bad": bad}
        with pytest.raises(StoreError):
            await store.attempts.score(claims[3], 1.0, details[3])
    results = await asyncio.gather(
        *(store.attempts.score(claim, 1.0, each) for claim, each in zip(claims, details, strict=True)),
        return_exceptions=True,
    )
    failed = [place for place, result in enumerate(results) if isinstance(result, BaseException)]
    assert failed == [3]
    assert isinstance(results[3], StoreError)
    failure = Failure(kind="scorer", message="m")
    await store.attempts.fail(claims[3], failure, max_attempts=1, backoff_seconds=0.0)
    scored = [record.score for record in await store.records.by_task("train/0/g")]
    assert scored == [1.0, 1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0]


async def test_520_tool_calls_of_one_turn_are_stored(store: Store) -> None:
    await run.add_task(store, "train/0/g", 0, generations=1)
    claim = await run.claim(store)
    executions = tuple(
        ToolExecution(name="t", arguments={"n": n}, result=f"{n}" + "r" * 33_500, error=False, seconds=0.1)
        for n in range(520)
    )
    whole = dataclasses.replace(run.call(claim, 0, 0, 2), tool_executions=executions)
    answers = tuple({"role": "tool", "execution": n} for n in range(520))
    following = dataclasses.replace(run.call(claim, 1, 0, 8), messages=answers)
    for call in (whole, following, whole):
        await store.model_calls.add(claim, call)
    assert await store.model_calls.by_record(claim.record_id) == [whole, following]
    stored = await store.database["DispatchedSamplingTask"].find_one({"_id": whole.id})
    shown = stored["tool_executions"][7]
    assert shown["result"].endswith("more characters are in GridFS]")
    assert shown["arguments"] == {"n": 7}
    view = await store.database["audit_conversations"].find_one({"_id": claim.record_id})
    assert view is not None
    assert "more characters are in GridFS]" in str(view)
    await store.attempts.release(claim)
    assert await violations(store) == []
