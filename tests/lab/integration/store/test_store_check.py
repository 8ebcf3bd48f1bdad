"""``agentrl db check`` on a real server: a whole run has no violation, a violation of each rule is found."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import small_run as run
from db_command import Db, check, violations

from agentrl.cli.main import main
from agentrl.config.schema import RunConfig
from agentrl.data.finalize_group import verifier
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.training import DBRecordData, read_checkpoints
from agentrl.errors import ConfigError
from agentrl.lab.check.reading import Invariant
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

FAILED, SCORED = f"{run.TRAINED}/0/1", f"{run.TRAINED}/0/2"
"""The two attempts at one slot of the trained group."""
OTHER = f"{run.TRAINED}/1/1"
READY = f"{run.READY}/0/1"
CALL = f"{OTHER}/1"
CLAIMED = f"{run.RUNNING}/0/1"
RELEASED = f"{run.RUNNING}/1/1"
OWNER = {"owner": "sampler", "attempt": 1}
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
LATER = datetime.now(UTC) + timedelta(days=1)


class Damage:
    """Writes that no validator sees."""

    def __init__(self, store: Store, weights: Path) -> None:
        self.database = store.database
        self.weights = weights

    async def set(self, collection: str, key: Any, /, **fields: Any) -> None:
        changes = {"$set": {name.replace("__", "."): value for name, value in fields.items()}}
        result = await self.database[collection].update_one(
            {"_id": key}, changes, bypass_document_validation=True
        )
        assert result.matched_count == 1

    async def file(self, data: bytes) -> None:
        """Write a file of ``abc`` into GridFS, and then ``data`` instead."""
        key = f"{READY}/input_ids/{hashlib.sha256(b'abc').hexdigest()[:16]}"
        await self.database["DBRecordData.packed.files"].insert_one({"_id": key, "length": 3})
        await self.database["DBRecordData.packed.chunks"].insert_one({"files_id": key, "n": 0, "data": data})

    async def delete(self, collection: str, key: Any) -> None:
        assert (await self.database[collection].delete_one({"_id": key})).deleted_count == 1

    async def copy(self, collection: str, key: Any, /, **fields: Any) -> None:
        document = await self.database[collection].find_one({"_id": key})
        assert document is not None
        await self.database[collection].insert_one({**document, **fields}, bypass_document_validation=True)

    async def written_late(self, record: str) -> None:
        """Give the first call of a Record to its second owner, and the second call to the first."""
        owners = [OWNER | {"ended": "lease"}, OWNER | {"attempt": 2}]
        await self.set("Record", record, owners=owners, fence=2)
        for index, attempt in enumerate((2, 1)):
            await self.set("DispatchedSamplingTask", f"{record}/{index}", attempt=attempt)


@pytest.fixture
async def weights(store: Store, tmp_path: Path) -> Path:
    """A run with every kind of group in it; the folder of its weights."""
    await run.build(store, tmp_path / "weights")
    return tmp_path / "weights"


async def test_a_run_that_goes_on_has_no_violation(store: Store, weights: Path) -> None:
    report = await check(store)
    assert [str(violation.problem) for violation in report.violations] == []
    checked = {invariant: dict(report.checked[invariant]) for invariant in Invariant}
    assert checked[Invariant.TRAJECTORIES] == {"slots": 11, "Records": 10, "model calls": 14}
    assert checked[Invariant.TRAINING] == {"training data": 4, "tokens": 48, "steps": 1}
    assert checked[Invariant.GROUPS] == {"groups": 4, "scores": 6}
    assert checked[Invariant.STATES]["leases"] == 1
    assert checked[Invariant.VERSIONS] == {"model calls": 14, "versions": 2, "files": 4}
    assert checked[Invariant.EPOCHS] == {"epochs": 2, "tasks": 6}
    assert checked[Invariant.CONTENTS] == {"checksums": 6 + 14 + 2 * 6 + 1}


async def test_the_command_tells_each_invariant_and_ends_with_the_count(
    store: Store, weights: Path, run_config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["db", "check", "--run_name", run_config.run_name, "--settle_seconds", "0"]
    words += ["--db_connection_string", str(run_config.db_connection_string)]
    assert await asyncio.to_thread(main, words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines[:7]] == ["1.", "2.", "3.", "4.", "5.", "6.", "7."]
    assert all("checked, 0 violations" in line for line in lines[:7])
    assert lines[-1] == "0 violations"
    await Damage(store, weights).set("Record", OTHER, score=0.25)
    assert await asyncio.to_thread(main, words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(f"invariant 1: Record {OTHER}: the score of its slot" in line for line in lines)
    assert lines[-1].endswith(" violations")
    assert lines[-1] != "0 violations"


async def test_at_the_end_nothing_may_be_unfinished(store: Store, weights: Path, tmp_path: Path) -> None:
    report = await check(store, is_final=True)
    found = {violation.problem.document for violation in report.violations}
    assert found == {f"Task {key} slot {number}" for key in (run.RUNNING, run.UNTOUCHED) for number in (0, 1)}


async def test_a_run_at_its_end_has_no_violation(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights", unfinished=False)
    checkpoint = run.write_checkpoint(tmp_path / "checkpoint-000001", 1, (run.STEP,))
    assert await violations(store, is_final=True, checkpoint=checkpoint) == []


async def test_the_last_checkpoint_is_read(tmp_path: Path) -> None:
    assert read_checkpoints(tmp_path) == []
    run.write_checkpoint(tmp_path / "checkpoint-000009", 9, ("1/1",))
    last = run.write_checkpoint(tmp_path / "checkpoint-000010", 10, ("1/1",))
    assert read_checkpoints(tmp_path)[-1] == last
    (last.folder / "state.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_checkpoints(tmp_path)


async def test_what_is_right_the_second_time_is_no_violation(store: Store, weights: Path) -> None:
    seen: list[str] = []

    def wrong_once(data: DBRecordData, calls: object, config: object, columns: object) -> str | None:
        seen.append(data.id)
        return "not yet" if seen.count(data.id) == 1 else None

    assert await violations(store, compare_tokens=wrong_once) == []
    assert sorted(seen) == sorted(2 * [OTHER, SCORED, READY, f"{run.READY}/1/1"])


async def test_each_owner_s_end_is_noted_also_of_those_that_had_made_no_record(store: Store) -> None:
    await run.add_task(store, run.RUNNING, 0, generations=2)
    early = await store.claims.claim(split="train", owner="early", lease_seconds=run.LEASE)
    late = await store.claims.claim(split="train", owner="late", lease_seconds=run.LEASE)
    assert early is not None
    assert late is not None
    await store.attempts.release(early)
    await store.claims.heartbeat([late], 0.0)
    taken = await store.claims.claim(split="train", owner="b", lease_seconds=run.LEASE)
    again = await store.claims.claim(split="train", owner="b", lease_seconds=run.LEASE)
    assert taken is not None
    assert again is not None
    await store.records.create(late)  # it does not know that it has lost the slot
    for claim in (taken, again):
        await store.records.create(claim)
    ends = {
        record.traj_id: [(owner.owner, owner.ended) for owner in record.owners]
        for record in await store.records.by_task(run.RUNNING)
    }
    assert ends == {
        0: [("early", "released"), ("b", None)], 1: [("late", "lease"), ("b", None)],
    }  # fmt: skip
    assert await violations(store) == []


async def test_an_admitted_group_that_nobody_has_claimed_is_legal(store: Store, weights: Path) -> None:
    await Damage(store, weights).set(
        "Task", run.UNTOUCHED, status="running", admission={"rank": 2, "after_step": 1}
    )
    assert await violations(store) == []


async def test_a_trajectory_that_another_owner_continues_is_legal(store: Store, tmp_path: Path) -> None:
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    await run.add_task(store, run.RUNNING, 0, generations=1)
    first = await run.claim(store)
    await store.model_calls.add(first, run.call(first, 0, 0, 2))
    await store.attempts.release(first)
    assert await violations(store) == []
    second = await store.claims.claim(split="train", owner="other", lease_seconds=run.LEASE)
    assert second is not None
    assert second.record_id == first.record_id
    assert await violations(store) == []  # claimed, not yet adopted
    await store.records.create(second)
    await store.model_calls.add(second, run.call(second, 1, 0, 8))
    assert await violations(store) == []
    assert (await check(store)).checked[Invariant.OWNERS] == {"owners": 2}
    await store.attempts.release(second)
    third = await run.claim(store)
    assert await store.model_calls.drop(third, 1) == 1
    assert await violations(store) == []  # it went another way at the second turn


async def test_an_expired_lease_waits_where_no_sampler_lives(store: Store, weights: Path) -> None:
    await Damage(store, weights).set("Task", run.RUNNING, slots__0__lease_expires_at=LONG_AGO)
    report = await check(store)
    assert report.violations == ()
    assert any("expired leases wait" in note for note in report.notes)


Break = Callable[[Damage], Awaitable[Any]]

BREAKS: dict[str, tuple[int, str, Break]] = {
    # invariant 1
    "a scored slot without its Record": (1, "one live Record", lambda d: d.delete("Record", OTHER)),
    "another score than the slot's": (
        1, "the score of its slot", lambda d: d.set("Record", OTHER, score=0.5)),
    "a scored slot whose Record is in work": (
        1, "settled, since its slot is scored", lambda d: d.set("Record", OTHER, status="running")),
    "a second live Record": (
        1, "dead, since attempt 1 is not what its slot",
        lambda d: d.set("Record", FAILED, status="scored")),
    "an ended Record of a running slot": (
        1, "a running Record, since", lambda d: d.set("Record", CLAIMED, status="failed")),
    "another owner than the slot's": (
        1, "the owner of its slot", lambda d: d.set("Record", CLAIMED, owner="stranger")),
    "an attempt that was never claimed": (
        1, "no attempt beyond its slot's",
        lambda d: d.copy("Record", FAILED, _id=f"{run.TRAINED}/0/9", attempt=9)),
    "a Record of no slot": (
        1, "its slot", lambda d: d.copy("Record", FAILED, _id=f"{run.TRAINED}/7/1", traj_id=7)),
    "an _id that is not its Task, slot and attempt": (
        1, "the _id of its Task", lambda d: d.copy("Record", FAILED, _id="stray")),
    "another epoch than the Task's": (1, "the epoch of its Task", lambda d: d.set("Record", OTHER, epoch=3)),
    "the wrong record_id": (
        1, "record_id of what it has begun", lambda d: d.set("Task", run.TRAINED, slots__1__record_id="x")),
    "a released slot without what goes on": (
        1, "which the next attempt goes on with", lambda d: d.set("Record", RELEASED, status="failed")),
    "a Record that was adopted by nobody": (
        1, "one to go on with, since attempt 1",
        lambda d: d.set("Record", CLAIMED, fence=0, status="failed")),
    "a fence that was never claimed": (
        1, "no fence beyond its slot's", lambda d: d.set("Record", CLAIMED, fence=7)),
    "a dropped branch that is gone": (
        1, "model calls that attempt 1 dropped", lambda d: d.set("Record", OTHER, owners__0__dropped=2)),
    "begun by a later attempt": (
        4, "begun by its attempt or an earlier one", lambda d: d.set("Task", run.RUNNING, slots__1__begun=5)),
    "two slots of one number": (
        1, "slots with unique numbers", lambda d: d.set("Task", run.TRAINED, slots__1__traj_id=0)),
    "a missing model call": (
        1, "its model calls in the order", lambda d: d.delete("DispatchedSamplingTask", CALL)),
    "a model call that traj does not name": (
        1, "its model calls in the order", lambda d: d.set("Record", OTHER, traj=[f"{OTHER}/0"])),
    "a gap in the indexes": (
        1, "gap-free indexes", lambda d: d.set("DispatchedSamplingTask", CALL, index=2)),
    "a parent that is not there": (
        1, "a parent among the calls", lambda d: d.set("DispatchedSamplingTask", CALL, parent="none")),
    "another number of tokens": (
        1, "bytes of output_ids", lambda d: d.set("DispatchedSamplingTask", CALL, output_ids=pack_ids([1]))),
    "a logprob too few": (
        1, "bytes of logprobs",
        lambda d: d.set("DispatchedSamplingTask", CALL, logprobs=pack_floats([-1.0]))),
    "a prompt that is not its parent's": (
        1, "prompt_tokens from its parent's",
        lambda d: d.set("DispatchedSamplingTask", CALL, prompt_tokens=5)),
    "versions that leave tokens out": (
        1, "policy versions that cover", lambda d: d.set("DispatchedSamplingTask", CALL, versions__0__end=2)),
    "another number of turns": (1, "turns", lambda d: d.set("Record", OTHER, turns=9)),
    "another number of generated tokens": (
        1, "generated_tokens", lambda d: d.set("Record", OTHER, generated_tokens=9)),
    "another oldest version": (1, "min_version", lambda d: d.set("Record", OTHER, min_version=1)),
    "a Record without its Task": (1, "the Task that it belongs to", lambda d: d.delete("Task", run.TRAINED)),
    "a model call without its Record": (
        1, "the Record that it belongs to", lambda d: d.delete("Record", FAILED)),
    # invariant 2
    "a ready Record without data": (2, "training data, since", lambda d: d.delete("DBRecordData", READY)),
    "data of no Record": (2, "its Record", lambda d: d.copy("DBRecordData", READY, _id="stray")),
    "data of a Record that is not ready": (
        2, "a Record that is ready", lambda d: d.set("Record", READY, status="abandoned")),
    "another advantage than the Record's": (
        2, "advantage of its Record", lambda d: d.set("DBRecordData", READY, advantage=7.0)),
    "tokens that no call generated": (
        2, "the tokens of its model calls",
        lambda d: d.set("DBRecordData", READY, input_ids=pack_ids(range(12)))),
    "other logprobs than the calls'": (
        2, "the tokens of its model calls",
        lambda d: d.set("DBRecordData", READY, behavior_logprobs=pack_floats([-9.0] * 8))),
    "a span of another version": (
        2, "the tokens of its model calls", lambda d: d.set("DBRecordData", READY, spans__0__version=0)),
    "a count that no step explains": (
        2, "trained_count of its", lambda d: d.set("DBRecordData", SCORED, trained_count=2)),
    "trained more often than allowed": (
        2, "at most max_trained_count", lambda d: d.set("DBRecordData", SCORED, trained_count=2)),
    "trained twice by a step": (
        2, "trained once by a step", lambda d: d.set("DBRecordData", SCORED, trained_at_steps=[1, 1])),
    "trained by a step that does not name it": (
        2, "named by step 1, which trained it", lambda d: d.set("TrainStep", run.STEP, data=[OTHER])),
    "trained, and ready again": (
        2, "trained, since it was trained 1 times", lambda d: d.set("DBRecordData", SCORED, status="ready")),
    "trained, but never": (
        2, "trained at least once", lambda d: d.set("DBRecordData", READY, status="trained")),
    "a step of data that it did not train": (
        2, f"trained by TrainStep {run.STEP}", lambda d: d.set("DBRecordData", SCORED, trained_at_steps=[])),
    "a plan without a step": (
        2, "named by step 2, which plans it",
        lambda d: d.set("DBRecordData", READY, status="planned", planned_step=2)),
    "a planned_step of data that are not planned": (
        2, "a planned_step if and only if", lambda d: d.set("DBRecordData", READY, planned_step=2)),
    "a Record that says another last step": (
        2, "last_trained_step", lambda d: d.set("Record", SCORED, last_trained_step=5)),
    "a step whose data are gone": (2, "its training data", lambda d: d.delete("DBRecordData", SCORED)),
    "a step that names data twice": (
        2, "once", lambda d: d.set("TrainStep", run.STEP, data=[SCORED, SCORED, OTHER])),
    "a gap in the committed steps": (2, "without a gap", lambda d: d.set("TrainStep", run.STEP, step=2)),
    "a plan for a later step": (
        2, "a plan for the next step",
        lambda d: d.copy("TrainStep", run.STEP, _id="1/5", step=5, status="planned")),
    "a plan whose data do not know of it": (
        2, "planned, since TrainStep 1/2 names it",
        lambda d: d.copy("TrainStep", run.STEP, _id="1/2", step=2, status="planned", data=[READY])),
    "a commit without its time": (
        2, "the time when it was committed", lambda d: d.set("TrainStep", run.STEP, committed_at=None)),
    "a step from an unknown version": (
        2, "the policy version that it starts", lambda d: d.set("TrainStep", run.STEP, policy_version=9)),
    # invariant 3
    "a failed trajectory with a score": (3, "no score", lambda d: d.set("Record", FAILED, score=0.0)),
    "a score that is not a number": (3, "a finite score", lambda d: d.set("Record", SCORED, score=None)),
    "a zero that is not a scorer's": (
        3, "the scorer that gave 0.0", lambda d: d.set("Record", SCORED, score_details={})),
    "a failure without a reason": (
        3, "a failure if and only if", lambda d: d.set("Record", FAILED, failure=None)),
    "an abandoned Record without a reason": (
        3, "a reason if and only if",
        lambda d: d.set("Record", f"{run.ABANDONED}/1/1", abandoned_because=None)),
    "an advantage that the group does not give": (
        3, "the advantage that its group", lambda d: d.set("Record", READY, advantage=0.25)),
    "another mean": (3, "group.mean_score", lambda d: d.set("Task", run.READY, group__mean_score=0.9)),
    "another pass rate": (3, "group.pass_rate", lambda d: d.set("Task", run.READY, group__pass_rate=0.9)),
    "a rule that no flag can have": (
        4, "--overlong_buffer 9 is longer",
        lambda d: d.set("Task", run.READY, group__rules__overlong_buffer=9)),
    "another count of scores": (3, "group.scored", lambda d: d.set("Task", run.READY, group__scored=3)),
    "another count of failures": (3, "group.failed", lambda d: d.set("Task", run.ABANDONED, group__failed=0)),
    "another outcome": (3, "group.outcome", lambda d: d.set("Task", run.READY, group__outcome="abandoned")),
    "a completed group without a summary": (
        3, "a group summary if and only if", lambda d: d.set("Task", run.READY, group=None)),
    # invariant 4
    "a state that there is none": (
        4, "the validator of Record", lambda d: d.set("Record", READY, status="lost")),
    "a Record that cannot be read": (
        4, "documents that can be read", lambda d: d.set("Record", READY, traj=5)),
    "a Task that cannot be read": (
        4, "documents that can be read", lambda d: d.set("Task", run.READY, slots=[{}])),
    "a Task that is not what its slots are": (
        4, "the status that follows", lambda d: d.set("Task", run.READY, status="running")),
    "a group with an open slot that nobody has admitted": (
        4, "the status that follows", lambda d: d.set("Task", run.UNTOUCHED, status="running")),
    "an admission of a group that is claimed": (
        4, "no admission rank", lambda d: d.set("Task", run.RUNNING, admission={"rank": 1, "after_step": 0})),
    "a running slot without a lease": (
        4, "lease_expires_at, since", lambda d: d.set("Task", run.RUNNING, slots__0__lease_expires_at=None)),
    "a running slot without an owner": (
        4, "owner, since", lambda d: d.set("Task", run.RUNNING, slots__0__owner=None)),
    "a lease of an open slot": (
        4, "no lease", lambda d: d.set("Task", run.RUNNING, slots__1__lease_expires_at=LATER)),
    "an owner of an open slot": (
        4, "no owner", lambda d: d.set("Task", run.RUNNING, slots__1__owner="s")),
    "a scored slot without a score": (
        4, "a score if and only if", lambda d: d.set("Task", run.TRAINED, slots__1__score=None)),
    "a scored slot that was never claimed": (
        4, "at least one attempt", lambda d: d.set("Task", run.TRAINED, slots__1__attempt=0)),
    "more released than claimed": (
        4, "at most as many releases", lambda d: d.set("Task", run.TRAINED, slots__1__released=4)),
    "a completed group whose Record is not settled": (
        4, "settled, since its group is completed", lambda d: d.set("Record", READY, status="scored")),
    "a settled Record of a running group": (
        4, "not settled, since its group", lambda d: d.set("Task", run.READY, status="waiting")),
    "a Record that ended for no reason": (
        4, "a stop reason", lambda d: d.set("Record", READY, stop_reason=None)),
    "model calls of a Record that has not begun": (
        4, "no model call", lambda d: d.set("Record", CLAIMED, status="created")),
    "a Record that trained without data": (
        4, "never trained", lambda d: d.set("Record", FAILED, trained_count=1)),
    # invariant 5
    "a gap in the versions": (5, "numbers without a gap", lambda d: d.delete("PolicyVersion", 0)),
    "a version of a step that was undone": (
        5, "made by 1/1", lambda d: d.set("TrainStep", run.STEP, status="reverted")),
    "a version of no step": (
        5, "the step that made it", lambda d: d.set("PolicyVersion", 1, train_step="9/9")),
    "a delta without its base": (
        5, "its base", lambda d: d.set("PolicyVersion", 1, base=9, encoding="delta")),
    "tokens of an unknown version": (
        5, "policy version 8 of its tokens",
        lambda d: d.set("DispatchedSamplingTask", CALL, versions__0__version=8)),
    "tokens of a version that was not published yet": (
        5, "policy version 1 published before", lambda d: d.set("PolicyVersion", 1, published_at=LATER)),
    # invariant 10
    "an owner that follows itself": (
        10, "owners in order", lambda d: d.set("Record", OTHER, owners=[OWNER | {"ended": "lease"}, OWNER])),
    "an owner that never ended, and another after it": (
        10, "why attempt 1 ended", lambda d: d.set("Record", OTHER, owners=[OWNER, OWNER | {"attempt": 2}])),
    "a fence that is not its last owner's": (
        10, "the attempt of its last owner",
        lambda d: d.set("Record", SCORED, owners=[OWNER | {"attempt": 3}])),
    "a model call of no owner": (
        10, "attempts of its Record's owners", lambda d: d.set("DispatchedSamplingTask", CALL, attempt=7)),
    "a tool call of no owner": (
        10, "attempts of its Record's owners",
        lambda d: d.set("DispatchedSamplingTask", f"{OTHER}/0", tool_executions__0__attempt=7)),
    "a model call after its owner's end": (
        10, "made while its owner had",
        lambda d: d.set("Record", OTHER, owners__0__until=LONG_AGO)),
    "an owner that wrote between two calls of a later one": (
        10, "one owner after the other", lambda d: d.written_late(OTHER)),
    "more turns replayed than there were": (
        10, "the turns that attempt 1 replayed", lambda d: d.set("Record", OTHER, owners__0__replayed=1)),
    # invariant 7
    "another response": (
        7, f"{CALL}: all as it was", lambda d: d.set("DispatchedSamplingTask", CALL, response__content="?")),
    "another message": (
        7, f"{CALL}: all as it was",
        lambda d: d.set("DispatchedSamplingTask", CALL, messages__0__content="forged")),
    "another final answer": (
        7, f"{OTHER}: sampled as it was", lambda d: d.set("Record", OTHER, final_answer="5")),
    "another answer of a Record": (7, "sampled as it was", lambda d: d.set("Record", OTHER, answer="5")),
    "another judgement": (
        7, f"{OTHER}: score as it was", lambda d: d.set("Record", OTHER, score_details__judge="wrong")),
    "another question of a finished Task": (
        7, f"{run.READY}: content as it was", lambda d: d.set("Task", run.READY, query="?")),
    "another answer of a finished Task": (
        7, f"{run.READY}: content as it was", lambda d: d.set("Task", run.READY, answer="5")),
    "other metrics": (7, "1/1: metrics as it was", lambda d: d.set("TrainStep", run.STEP, metrics__loss=0.0)),
    "an image of other bytes": (
        7, "its bytes", lambda d: d.database["Image"].insert_one(
            {"_id": "0" * 64, "data": b"x"}, bypass_document_validation=True)),
    "a file of other bytes": (7, "its bytes as they were", lambda d: d.file(b"xyz")),
    "a document without its file": (
        7, "its file in GridFS", lambda d: d.set("DBRecordData", READY, packed_in_gridfs=["input_ids/0"])),
}  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize("name", BREAKS)
async def test_a_violation_of_each_rule_is_found(store: Store, weights: Path, name: str) -> None:
    invariant, what, damage = BREAKS[name]
    await damage(Damage(store, weights))
    found = [str(item.problem) for item in (await check(store)).of(Invariant(invariant))]
    assert any(what in text for text in found), found


@pytest.mark.parametrize("harm", ["changed", "cut", "deleted", "folder"])
async def test_a_harmed_weight_file_is_found(store: Store, weights: Path, harm: str) -> None:
    file = weights / "v000001" / "model.safetensors"
    if harm == "changed":
        file.write_bytes(bytes(64))
    elif harm == "cut":
        file.write_bytes(bytes([1]))
    elif harm == "deleted":
        file.unlink()
    else:
        file.parent.rename(weights / "elsewhere")
    (violation,) = (await check(store)).violations
    assert violation.invariant is Invariant.VERSIONS
    assert violation.problem.document == "PolicyVersion 1"
    assert (await check(store, verify_files=None)).violations == ((violation,) if harm == "folder" else ())


async def test_only_a_pruned_folder_may_be_missing(store: Store, weights: Path) -> None:
    await Damage(store, weights).set("PolicyVersion", 0, attempt=1)
    shutil.rmtree(weights / "v000000")
    (violation,) = (await check(store)).violations
    assert "its folder, which is not pruned" in str(violation.problem)
    await store.policy_versions.mark_pruned([0])
    assert await violations(store) == []


async def test_a_dead_owner_s_lease_is_found_while_others_live(store: Store, weights: Path) -> None:
    await run.claim(store)
    await Damage(store, weights).set("Task", run.RUNNING, slots__0__lease_expires_at=LONG_AGO)
    (violation,) = (await check(store)).violations
    assert violation.invariant is Invariant.STATES
    assert "a lease of sampler that has not expired" in str(violation.problem)


@pytest.mark.parametrize(
    ("contained", "is_final"), [(("1/7",), False), ((), False), ((), True), (("1/1", "1/2"), False)]
)
async def test_steps_beside_the_lineage_are_found(
    store: Store, tmp_path: Path, contained: tuple[str, ...], is_final: bool
) -> None:
    await run.build(store, tmp_path / "weights", unfinished=False)
    checkpoint = run.write_checkpoint(tmp_path / "checkpoint-000001", 1, contained)
    (violation,) = (await check(store, checkpoint=checkpoint, is_final=is_final)).violations
    assert violation.invariant is Invariant.TRAINING
    assert "of checkpoint-000001" in str(violation.problem)


@pytest.mark.attack
async def test_a_file_of_no_document_is_named(store: Store, weights: Path) -> None:
    await Damage(store, weights).file(b"abc")
    report = await check(store)
    assert [str(item.problem) for item in report.violations] == []
    assert any(
        "DBRecordData: 1 files in GridFS belong to no document: train/0/ready" in x for x in report.notes
    )


async def test_a_document_that_lost_its_checksums_is_found(store: Store, weights: Path) -> None:
    await Damage(store, weights).set("Record", OTHER, checksums={})
    (violation,) = (await check(store)).violations
    assert str(violation.problem) == f"Record {OTHER}: checksums: expected one or more, found none"


@pytest.mark.attack
async def test_data_that_were_set_back_are_not_trained_again(store: Store, weights: Path) -> None:
    for key in (SCORED, OTHER):
        await Damage(store, weights).set("DBRecordData", key, status="ready")
    tasks = {member.task for member in await store.training.ready_members("train", step=2)}
    assert tasks == {run.READY}
    again = await store.training.ready_members("train", step=2, max_trained_count=2)
    assert {member.task for member in again} == {run.READY, run.TRAINED}
    await Damage(store, weights).set("DBRecordData", SCORED, trained_count=0, trained_at_steps=[])
    forged = await store.training.fetch([SCORED])
    assert "trained_count: 0, of its Record 1" in (await verifier(store)(forged))[run.TRAINED]


async def test_the_limit_is_that_of_the_run_s_trainer(store: Store, weights: Path, db: Db) -> None:
    await Damage(store, weights).set("DBRecordData", SCORED, status="ready")
    await store.settings.join("train", {"max_trained_count": 2}, given=(), packages={})
    await db("check", "--settle_seconds", "0")
    assert "since it was trained 1 times (max_trained_count)" in await db(
        "check", "--settle_seconds", "0", "--max_trained_count", "1", code=1
    )


async def test_what_retention_has_pruned_is_no_violation(store: Store, weights: Path) -> None:
    damage, moment = Damage(store, weights), datetime.now(UTC)
    for key in (SCORED, OTHER):
        await store.database["DispatchedSamplingTask"].delete_many({"record": key})
        await damage.delete("DBRecordData", key)
        await damage.set("Record", key, pruned_at=moment)
    assert await violations(store) == []
