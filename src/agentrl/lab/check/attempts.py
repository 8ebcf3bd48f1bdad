"""Invariants 1, 3 and 4: slots, Records and model calls agree, and so do groups, evaluations and columns."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from agentrl.documents.document import is_finite
from agentrl.documents.record import Record
from agentrl.documents.run import OUTSIDE_VERSION
from agentrl.documents.status import ColumnStatus, EvaluationStatus, RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import Task, record_key
from agentrl.lab.check.reading import (
    CheckProblem,
    CheckSection,
    ConsistentRead,
    Findings,
    Invariant,
    differing,
    only_if,
)
from agentrl.scoring.evaluation import pass_at_k
from agentrl.scoring.groups import BUILT_IN, FAILED, Step, decide_group, filtered_of, rules_of, summarize
from agentrl.store.evaluations import RECORD_FIELDS, evaluated_task
from agentrl.store.groups import UNFILLED
from agentrl.store.mechanics.blobs import MARK, moved_fields
from agentrl.store.mechanics.connection import COLUMN, EVALUATION, MODEL_CALL, RECORD, TASK, Json
from agentrl.store.records import WITHOUT_BRANCHES

SETTLED = frozenset({RecordStatus.SCORED, RecordStatus.READY, RecordStatus.ABANDONED})
"""A Record with a score."""
ENDED = frozenset(RecordStatus) - {
    RecordStatus.CREATED, RecordStatus.RUNNING, RecordStatus.COMPLETED, RecordStatus.SCORING,
}  # fmt: skip
"""A Record that no sampler writes any more."""
DEAD = ENDED - SETTLED
"""A Record that no sampler writes, and that has no score."""
TERMINAL = frozenset({SlotStatus.SCORED, SlotStatus.FAILED})
_LIVING = frozenset({SlotStatus.RUNNING, SlotStatus.SAMPLED, SlotStatus.SCORED})
"""A slot whose Record is alive."""
_GOES_ON = (RecordStatus.CREATED, RecordStatus.RUNNING, RecordStatus.RELEASED)
"""A Record that a claim has not adopted yet."""

CHECKED_FIELDS = {
    "task": 1, "traj_id": 1, "attempt": 1, "split": 1, "epoch": 1, "status": 1, "score": 1,
    "score_details.scorer": 1, "stop_reason": 1, "failure.kind": 1, "abandoned_because": 1, "advantage": 1,
    "score_details.turn_rewards": 1, "score_details.role_rewards": 1, "score_details.call_roles": 1,
    "turn_advantages": 1,
    "turns": 1, "tool_calls": 1, "context_resets": 1, "prompt_tokens": 1, "generated_tokens": 1,
    "min_version": 1, "max_version": 1, "owner": 1, "fence": 1, "owners": 1, "traj": 1, "trained_count": 1,
    "last_trained_step": 1, "scored_at": 1, "pruned_at": 1, "untrained_calls": 1, "dropped_calls": 1,
    "train_rule": 1,
    # Take two numbers of each scorer: its details may have the replies of a judge.
    "score_details.parts": {
        "$arrayToObject": {
            "$map": {
                # A scorer of one's own may call anything its parts.
                "input": {
                    "$cond": [
                        {"$eq": [{"$type": "$score_details.parts"}, "object"]},
                        {"$objectToArray": "$score_details.parts"}, [],
                    ]
                },
                "as": "part",
                "in": {"k": "$$part.k", "v": {"weight": "$$part.v.weight", "score": "$$part.v.score"}},
            }
        }
    },
}  # fmt: skip
"""The fields of a Record that the rules need; texts are left out."""

_BYTES = 4
"""The size of one packed id and of one packed logprob."""
_PACKED = ("context_ids", "output_ids", "logprobs")

_CALL_FIELDS = {
    "record": 1, "index": 1, "parent": 1, "drops_thoughts": 1, "opens_branch": 1, "fixed.model": 1,
    "status": 1, "role": 1, "anchor": 1, "versions": 1, "prompt_tokens": 1,
    "generated_tokens": 1, "created_at": 1, "packed_in_gridfs": 1,
    "executions": {"$size": "$tool_executions"},
    "attempt": 1,
    "ran_by": {"$concatArrays": ["$tool_executions.attempt", {"$ifNull": ["$events.attempt", []]}]},
    **{name: {"$binarySize": f"${name}"} for name in _PACKED},
}  # fmt: skip


def slot_problems(task: Json, records: Sequence[Json], is_final: bool) -> Iterator[CheckProblem]:
    """Yield contradictions between the slots of a Task and all their Records."""
    slots = {slot["traj_id"]: slot for slot in task["slots"]}
    if len(slots) != len(task["slots"]):
        numbers = [slot["traj_id"] for slot in task["slots"]]
        yield CheckProblem(f"Task {task['_id']}", "slots with unique numbers", sorted(slots), numbers)
    of_slot: dict[int, dict[int, Json]] = {number: {} for number in slots}
    for record in records:
        slot = slots.get(record["traj_id"])
        if slot is None:
            yield CheckProblem(
                f"Record {record['_id']}", "its slot", f"one of {sorted(slots)}", record["traj_id"]
            )
            continue
        of_slot[record["traj_id"]][record["attempt"]] = record
        yield from _belonging(task, slot, record)
    for number, slot in slots.items():
        name = f"Task {task['_id']} slot {number}"
        if is_final and slot["status"] not in TERMINAL:
            yield CheckProblem(name, "terminal at the end of the run", "scored or failed", slot["status"])
        yield from _of_slot(name, task, slot, of_slot[number])


def _belonging(task: Json, slot: Json, record: Json) -> Iterator[CheckProblem]:
    name = f"Record {record['_id']}"
    key = record_key(task["_id"], record["traj_id"], record["attempt"])
    yield from differing(
        name,
        [
            ("the _id of its Task, slot and attempt", key, record["_id"]),
            ("the split of its Task", task["split"], record["split"]),
            ("the epoch of its Task", task["epoch"], record["epoch"]),
        ],
    )
    for what, attempt in (("attempt", record["attempt"]), ("fence", record.get("fence") or 0)):
        if attempt > slot["attempt"]:
            yield CheckProblem(name, f"no {what} beyond its slot's", f"at most {slot['attempt']}", attempt)


def _of_slot(name: str, task: Json, slot: Json, records: Mapping[int, Json]) -> Iterator[CheckProblem]:
    """Check the Records of a slot; ``records`` has them by the attempt that began them."""
    begun = slot.get("begun")
    number = slot["attempt"] if begun is None else begun
    key = record_key(task["_id"], slot["traj_id"], number)
    current = records.get(number)
    if slot["status"] in _LIVING:
        yield from differing(name, [("record_id of what it has begun", key, slot.get("record_id"))])
    if slot["status"] in (SlotStatus.SAMPLED, SlotStatus.SCORED):
        yield from _ended(name, slot, key, current)
    elif slot["status"] == SlotStatus.RUNNING and current is not None:
        yield from _running(slot, current)
    elif slot["status"] == SlotStatus.OPEN and begun is not None:
        status = "none" if current is None else current["status"]
        if status != RecordStatus.RELEASED:
            what = f"a released Record {key}, which the next attempt goes on with"
            yield CheckProblem(name, what, RecordStatus.RELEASED, status)
    living = number if slot["status"] in _LIVING else None
    for other, record in records.items():
        yield from _dropped(record, records)
        if other != living and record["status"] not in DEAD:
            what = f"dead, since attempt {other} is not what its slot has begun"
            yield CheckProblem(f"Record {record['_id']}", what, " or ".join(sorted(DEAD)), record["status"])


def _running(slot: Json, record: Json) -> Iterator[CheckProblem]:
    """Check the Record of a running slot."""
    name, status = f"Record {record['_id']}", record["status"]
    fence = record.get("fence")
    if fence is not None and fence < slot["attempt"]:
        if status not in _GOES_ON:
            what = f"one to go on with, since attempt {slot['attempt']} has claimed its slot"
            yield CheckProblem(name, what, " or ".join(_GOES_ON), status)
        return
    if status in ENDED:
        what = "a running Record, since its slot is running"
        yield CheckProblem(name, what, "created to scoring", status)
    yield from differing(name, [("the owner of its slot", slot.get("owner"), record.get("owner"))])


def _dropped(record: Json, records: Mapping[int, Json]) -> Iterator[CheckProblem]:
    """Check that what a divergence dropped is kept, as the Record of the attempt in which it was."""
    if record.get("train_rule") is not None:
        return  # of a gateway: dropped calls stay where they are, untrained
    for owner in record.get("owners") or ():
        if owner.get("dropped") and owner["attempt"] not in records.keys() - {record["attempt"]}:
            what = f"the Record of the {owner['dropped']} model calls that attempt {owner['attempt']} dropped"
            key = record_key(record["task"], record["traj_id"], owner["attempt"])
            yield CheckProblem(f"Record {record['_id']}", what, key, "none")


def _ended(name: str, slot: Json, key: str, record: Json | None) -> Iterator[CheckProblem]:
    """Check a slot that is sampled or scored, and its Record."""
    if slot["status"] == SlotStatus.SAMPLED:
        status = "none" if record is None else record["status"]
        if status != RecordStatus.COMPLETED:
            what = "a completed Record, since it waits for a score"
            yield CheckProblem(name, what, RecordStatus.COMPLETED, status)
        return
    if record is None:
        yield CheckProblem(name, "one live Record", key, "none")
        return
    if record["status"] not in SETTLED:
        what = "settled, since its slot is scored"
        yield CheckProblem(f"Record {record['_id']}", what, " or ".join(sorted(SETTLED)), record["status"])
    yield from differing(
        f"Record {record['_id']}", [("the score of its slot", slot.get("score"), record.get("score"))]
    )


async def read_call_sizes(moment: ConsistentRead, record_ids: Sequence[str]) -> dict[str, list[Json]]:
    """Return the calls of Records by index, with the sizes in bytes of their token arrays."""
    calls: dict[str, list[Json]] = {key: [] for key in record_ids}
    pipeline: list[Json] = [
        {"$match": {"record": {"$in": list(record_ids)}}},
        {"$sort": {"record": 1, "index": 1}},
        {"$project": _CALL_FIELDS},
    ]
    for call in await moment.aggregate(MODEL_CALL, pipeline):
        if call.get("packed_in_gridfs"):
            call.update(await _sizes(moment, call))
        calls[call["record"]].append(call)
    return calls


async def _sizes(moment: ConsistentRead, call: Json) -> Json:
    names = moved_fields(call)
    files = await moment.by_id(f"{MODEL_CALL}.packed.files", names, {"length": 1})
    return {name: files[key]["length"] if key in files else None for key, name in names.items()}


def call_problems(record: Json, calls: Sequence[Json]) -> Iterator[CheckProblem]:
    """Yield contradictions between a Record and its model calls."""
    expected = list(record["traj"])
    keys = [call["_id"] for call in calls]
    name = f"Record {record['_id']}"
    trained = {*(record.get("dropped_calls") or ())}.difference(record.get("untrained_calls") or ())
    yield from differing(
        name,
        [
            ("its model calls in the order of traj", expected, keys),
            ("gap-free indexes of its calls", list(range(len(calls))), [call["index"] for call in calls]),
            ("calls with its _id as prefix", [f"{record['_id']}/{call['index']}" for call in calls], keys),
            ("dropped calls that may be trained", [], sorted(trained)),
        ],
    )
    yield from differing(name, _sums(record, calls))
    earlier: dict[str, Json] = {}
    for call in calls:
        yield from _call(call, earlier)
        earlier[call["_id"]] = call


def _sums(record: Json, calls: Sequence[Json]) -> list[tuple[str, Any, Any]]:
    calls = [call for call in calls if call["index"] not in (record.get("dropped_calls") or ())]
    versions = [span["version"] for call in calls for span in call["versions"]]
    resets = sum(
        call["parent"] is None
        and call["index"] > 0
        and not call.get("drops_thoughts")
        and not call.get("opens_branch")
        for call in calls
    )
    prompts = [call["prompt_tokens"] for call in calls if not call.get("fixed")]
    return [
        ("turns", len(calls), record["turns"]),
        ("tool_calls", sum(call["executions"] for call in calls), record["tool_calls"]),
        ("context_resets", resets, record["context_resets"]),
        ("prompt_tokens of the policy's last call", prompts[-1] if prompts else 0, record["prompt_tokens"]),
        ("generated_tokens", sum(call["generated_tokens"] for call in calls), record["generated_tokens"]),
        ("min_version", min(versions, default=None), record.get("min_version")),
        ("max_version", max(versions, default=None), record.get("max_version")),
    ]  # fmt: skip


def _call(call: Json, earlier: dict[str, Json]) -> Iterator[CheckProblem]:
    name = f"DispatchedSamplingTask {call['_id']}"
    parent = earlier.get(call["parent"]) if call["parent"] is not None else None
    if call["parent"] is not None and parent is None:
        yield CheckProblem(name, "a parent among the calls before it", sorted(earlier), call["parent"])
        return
    for field in {*_PACKED, *moved_fields(call).values()}:
        if call[field] is None:
            yield CheckProblem(name, f"its {field} in GridFS", "a file", "none")
            return
    before = parent["prompt_tokens"] + parent["generated_tokens"] if parent else 0
    generated = call["generated_tokens"] * _BYTES
    yield from differing(
        name,
        [
            ("bytes of output_ids", generated, call["output_ids"]),
            ("bytes of logprobs, one for each token", call["output_ids"], call["logprobs"]),
            ("prompt_tokens from its parent's and context_ids", before + call["context_ids"] // _BYTES,
             call["prompt_tokens"]),
        ],
    )  # fmt: skip
    reached = 0
    for span in call["versions"]:
        if span["start"] != reached or span["end"] < span["start"]:
            break
        reached = span["end"]
    if reached != call["generated_tokens"]:
        spans = [(span["version"], span["start"], span["end"]) for span in call["versions"]]
        yield CheckProblem(
            name, "policy versions that cover its tokens", f"[0, {generated // _BYTES})", spans
        )


def owner_problems(record: Json, calls: Sequence[Json], clock_skew_seconds: float) -> Iterator[CheckProblem]:
    """Yield contradictions between the owners of a Record, and calls that none of them made in its time.

    Records of older versions have no owners, nor has what a divergence dropped.
    """
    name, owners = f"Record {record['_id']}", record.get("owners")
    if not owners:
        return
    attempts = [owner["attempt"] for owner in owners]
    if attempts != sorted(set(attempts)) or attempts[0] < record["attempt"]:
        yield CheckProblem(name, "owners in order", f"rising attempts from {record['attempt']} on", attempts)
    yield from differing(name, [("the attempt of its last owner", attempts[-1], record.get("fence"))])
    for owner in owners[:-1]:
        if owner.get("ended") is None:
            what = f"why attempt {owner['attempt']} ended, since another owner followed"
            yield CheckProblem(name, what, "a reason", None)
    yield from _writers(name, {owner["attempt"]: owner for owner in owners}, calls, clock_skew_seconds)
    dropped = 0
    for owner in reversed(owners):
        dropped += owner.get("dropped", 0)
        earlier = sum((call.get("attempt") or 0) < owner["attempt"] for call in calls)
        if owner.get("replayed", 0) > earlier + dropped:
            what = f"the turns that attempt {owner['attempt']} replayed"
            yield CheckProblem(name, what, f"at most the {earlier + dropped} before it", owner["replayed"])


def _writers(
    name: str, owners: Mapping[int, Json], calls: Sequence[Json], clock_skew_seconds: float
) -> Iterator[CheckProblem]:
    """Check that owners wrote one after the other, and none after its end."""
    writers = [call["attempt"] for call in calls if call.get("attempt") is not None]
    if writers != sorted(writers):
        yield CheckProblem(name, "model calls of one owner after the other", sorted(writers), writers)
    for call in calls:
        what, attempt = f"DispatchedSamplingTask {call['_id']}", call.get("attempt")
        of_tools = [by for by in call.get("ran_by", ()) if by is not None]
        if strangers := {attempt, *of_tools} - owners.keys() - {None}:
            yield CheckProblem(what, "attempts of its Record's owners", sorted(owners), sorted(strangers))
        elif attempt is not None:
            if of_tools and min(of_tools) < attempt:
                yield CheckProblem(what, "tool calls after it", f"from attempt {attempt} on", min(of_tools))
            # Ask for the last writer: a later owner writes it again when it has run its tools.
            until, made = owners[max([attempt, *of_tools])].get("until"), call["created_at"]
            if until is not None and made > until + timedelta(seconds=clock_skew_seconds):
                yield CheckProblem(what, "made while its owner had the Record", f"until {until}", made)


class _Parents(CheckSection):
    """Checks that the documents named by the field ``order`` exist in the collection ``parents``."""

    parents: ClassVar[str]
    page_size: ClassVar[int] = 5000

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        named = {document[self.order] for document in page}
        for key in sorted(named - await moment.ids(self.parents, named)):
            name, what = f"{self.collection} of {key}", f"the {self.parents} that it belongs to"
            findings.wrong(Invariant.TRAJECTORIES, key, name, what, key, "none")


class RecordParentsCheck(_Parents):
    """Checks that every Record has its Task."""

    collection = RECORD
    parents = TASK
    order = "task"
    fields: ClassVar = {"task": 1, "_id": 0}


class CallParentsCheck(_Parents):
    """Checks that every model call has its Record."""

    collection = MODEL_CALL
    parents = RECORD
    order = "record"
    fields: ClassVar = {"record": 1, "_id": 0}


_TOLERANCE = 1e-9
_DECIDING = (
    "_id", "task", "traj_id", "attempt", "split", "epoch", "score", "stop_reason", "turns", "min_version",
    "max_version", "generated_tokens", "score_details", "dropped_calls", "untrained_calls",
)  # fmt: skip


def score_problems(record: Json) -> Iterator[CheckProblem]:
    """Yield contradictions between the status of a Record and its score, failure and reason."""
    name, status, score = f"Record {record['_id']}", record["status"], record.get("score")
    if status in DEAD and score is not None:
        yield CheckProblem(name, f"no score, since it is {status}", None, score)
    if status in SETTLED:
        yield from _settled(name, record)
    elif record.get("advantage") is not None:
        yield CheckProblem(name, f"no advantage, since it is {status}", None, record["advantage"])
    if status not in SETTLED | DEAD and score is not None:
        yield CheckProblem(name, f"no score, since it is {status}", None, score)
    what, failure = f"a failure if and only if it failed (it is {status})", record.get("failure") or None
    yield from only_if(name, what, status == RecordStatus.FAILED, failure, "a failure")
    what, reason = "a reason if and only if it is abandoned", record.get("abandoned_because") or None
    yield from only_if(name, what, status == RecordStatus.ABANDONED, reason, "a reason")


def _settled(name: str, record: Json) -> Iterator[CheckProblem]:
    score = record.get("score")
    if not is_finite(score):
        yield CheckProblem(name, "a finite score", "a number", score)
    if not record.get("score_details", {}).get("scorer"):
        yield CheckProblem(name, f"the scorer that gave {score}", "score_details.scorer", None)
    if record.get("scored_at") is None:
        yield CheckProblem(name, "the time when it was scored", "a time", None)


def group_problems(
    task: Json, records: Sequence[Json], trained: int, calls: Mapping[str, Sequence[Json]]
) -> Iterator[CheckProblem]:
    """Yield differences between a group's summary and its Records; ``trained`` counts its training data.

    ``calls`` are the model calls of each Record.
    """
    name, group = f"Task {task['_id']}", task.get("group")
    is_final = task["status"] == TaskStatus.COMPLETED
    what = f"a group summary if and only if it is completed (it is {task['status']})"
    yield from only_if(name, what, is_final, group or None, "a summary")
    if not is_final or not group:
        return
    scored = [_record(record) for record in records if record.get("score") is not None]
    failed = sum(slot["status"] == SlotStatus.FAILED for slot in task["slots"])
    expected_group = summarize(scored, failed, trained, group.get("rules") or group)
    given_up = group.get("outcome") == FAILED
    if given_up:
        expected_group["outcome"] = FAILED
        if not group.get("problem"):
            yield CheckProblem(name, "the reason why it could not be finalized", "group.problem", None)
    yield from (
        CheckProblem(name, f"group.{key} of its Records", value, group.get(key))
        for key, value in expected_group.items()
        if not _close(value, group.get(key))
    )
    rules = group.get("rules")
    if group.get("kept_as_trained"):
        return
    reads_calls = rules is not None and rules.get("step_advantage", "off") != "off"
    if reads_calls and any(record.get("pruned_at") for record in records):
        return
    if rules is not None and not given_up and rules.get("advantage", "leave_one_out") in BUILT_IN:
        yield from _advantages(task, records, scored, group, calls)


def _advantages(
    task: Json, records: Sequence[Json], scored: Sequence[Record], group: Mapping[str, Any],
    calls: Mapping[str, Sequence[Json]],
) -> Iterator[CheckProblem]:  # fmt: skip
    rules = group["rules"]
    rng = random.Random(f"{rules['seed']}/{task['_id']}")
    steps = {
        key: [
            Step(index=call["index"], role=call.get("role"), anchor=call.get("anchor"))
            for call in made
            if not call.get("fixed")
        ]
        for key, made in calls.items()
    }
    decisions = decide_group(
        scored, rules_of(rules), rng, filtered_of(group), steps, rules.get("baseline_mean")
    )
    by_id = {record["_id"]: record for record in records}
    for decision in decisions:
        record = by_id[decision.record_id]
        name, advantage = f"Record {decision.record_id}", record.get("advantage")
        if decision.advantage is None:
            because = decision.abandoned_because
            yield from differing(name, [("abandoned_because", because, record.get("abandoned_because"))])
        elif record["status"] == RecordStatus.READY and not _close(decision.advantage, advantage):
            yield CheckProblem(name, "the advantage that its group gives it", decision.advantage, advantage)
        elif record["status"] == RecordStatus.READY and not _all_close(
            decision.turn_advantages, record.get("turn_advantages") or ()
        ):
            expected, stored = decision.turn_advantages, record.get("turn_advantages")
            yield CheckProblem(name, "the turn advantages that its group gives it", expected, stored)
        elif record["status"] == RecordStatus.ABANDONED and advantage is not None:
            yield CheckProblem(name, "no advantage, since it is abandoned", None, advantage)


def _record(document: Json) -> Record:
    """Return a Record with the fields that deciding a group needs."""
    known = {name: document[name] for name in _DECIDING if document.get(name) is not None}
    return Record.from_document({"query": "", **known})


def _all_close(expected: Sequence[float], found: Sequence[Any]) -> bool:
    return len(expected) == len(found) and all(map(_close, expected, found))


def _close(expected: Any, found: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(expected, found, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(expected == found)


class EvaluationsCheck(CheckSection):
    """Checks the numbers of every finished Evaluation."""

    collection = EVALUATION
    fields: ClassVar = {"status": 1, "results.total": 1, "right_threshold": 1, "finished_at": 1}
    page_size = 1

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        for evaluation in page:
            findings.count(Invariant.GROUPS, "evaluations")
            if evaluation["status"] != EvaluationStatus.FINISHED:
                continue
            newer = {"split": evaluation["_id"], "scored_at": {"$gt": evaluation["finished_at"]}}
            if await moment.find(RECORD, newer, {"_id": 1}, limit=1):
                findings.note(
                    f"{evaluation['_id']} was scored again: `agentrl eval` computes its numbers anew"
                )
                continue
            findings.add(Invariant.GROUPS, evaluation["_id"], await _problems(moment, evaluation))


class OutsideTokensCheck(CheckSection):
    """Checks that Records with tokens of a model folder belong to an Evaluation of a model folder."""

    collection = RECORD
    fields: ClassVar = {"split": 1, "min_version": 1}
    page_size = 2000

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        outside = [record for record in page if record.get("min_version") == OUTSIDE_VERSION]
        if not outside:
            return
        splits = sorted({record["split"] for record in outside})
        known = await moment.by_id(EVALUATION, splits, {"version": 1})
        for record in outside:
            evaluation = known.get(record["split"])
            if evaluation is None or evaluation["version"] is not None:
                key, what = record["_id"], "tokens of a model folder"
                expected, found = "an Evaluation of a model folder", f"split {record['split']}"
                findings.wrong(Invariant.VERSIONS, key, f"Record {key}", what, expected, found)


async def _problems(moment: ConsistentRead, evaluation: Json) -> list[CheckProblem]:
    split, name = evaluation["_id"], f"Evaluation {evaluation['_id']}"
    of_task: dict[str, list[Json]] = defaultdict(list)
    async for record in moment.each(RECORD, {"split": split, **WITHOUT_BRANCHES}, RECORD_FIELDS):
        of_task[record["task"]].append(record)
    means, rates, failed, scored = [], [], 0, 0
    tasks = await moment.find(TASK, {"split": split})
    for document in tasks:
        task = Task.from_document(document)
        item = evaluated_task(task, of_task[task.id], "", evaluation["right_threshold"])
        failed, scored = failed + item.failed, scored + len(item.scores)
        if item.scores:
            means.append(math.fsum(item.scores) / len(item.scores))
            rates.append(pass_at_k(len(item.scores), item.passes, 1))
    total = evaluation["results"]["total"]
    rows = [
        ("its number of tasks", len(tasks), total["tasks"]),
        ("its scored trajectories", scored, total["scored"]),
        ("its failed trajectories", failed, total["failed"]),
    ]
    problems = differing(name, rows)
    for what, values, stored in (
        ("its mean score", means, total["score"]), ("its pass@1", rates, total["pass_at"].get("1")),
    ):  # fmt: skip
        expected = math.fsum(values) / len(values) if values else None
        number = None if stored is None else stored["value"]
        if (expected is None) != (number is None) or abs((expected or 0.0) - (number or 0.0)) > _TOLERANCE:
            problems.append(CheckProblem(name, what, expected, number))
    return problems


class ColumnsCheck(CheckSection):
    """Checks every Column against its Record and its Task."""

    collection = COLUMN
    page_size = 100
    fields: ClassVar = {
        "record": 1, "task": 1, "name": 1, "status": 1, "owner": 1, "lease_expires_at": 1, "problem": 1,
        "by": 1, "filled_at": 1, MARK: 1, "packed": {"$binarySize": "$values"},
    }  # fmt: skip

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        fields = {"task": 1, "score": 1, "generated_tokens": 1, "dropped_tokens": 1}
        records = await moment.by_id(RECORD, {column["record"] for column in page}, fields)
        tasks = await moment.by_id(TASK, {column["task"] for column in page}, {"status": 1})
        findings.count(Invariant.STATES, "columns", len(page))
        for column in page:
            record, task = records.get(column["record"]), tasks.get(column["task"])
            findings.add(Invariant.STATES, column["_id"], column_problems(column, record, task))


def column_problems(column: Json, record: Json | None, task: Json | None) -> Iterator[CheckProblem]:
    """Yield illegal combinations of a Column's fields, and contradictions to its Record and its Task."""
    name, status = f"Column {column['_id']}", column["status"]
    if record is None or task is None:
        yield CheckProblem(name, "its Record and its Task", column["record"], "none")
        return
    if record.get("score") is None:
        yield CheckProblem(name, "a Record with a score", "a score", None)
    rows = [("the Task of its Record", record["task"], column["task"])]
    is_filled = status == ColumnStatus.FILLED
    if is_filled and not column.get(MARK):
        tokens = record["generated_tokens"] + (record.get("dropped_tokens") or 0)
        rows.append(("bytes of values", 4 * tokens, column["packed"]))
    yield from differing(name, rows)
    for field, is_due in (
        ("owner", status == ColumnStatus.RUNNING), ("lease_expires_at", status == ColumnStatus.RUNNING),
        ("by", is_filled), ("filled_at", is_filled),
    ):  # fmt: skip
        yield from only_if(name, f"{field}, since it is {status}", is_due, column.get(field))
    if status == ColumnStatus.FAILED and not column.get("problem"):
        yield CheckProblem(name, "a problem, since it was given up", "a problem", None)
    if status in UNFILLED and task["status"] == TaskStatus.COMPLETED:
        yield CheckProblem(
            name, "no column left to fill in a finalized group", ColumnStatus.FILLED.value, status
        )
