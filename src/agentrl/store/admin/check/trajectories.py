"""Invariant 1: a scored slot has one live Record, and every model call that the Record counts exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.documents.task import record_key
from agentrl.store.admin.check.reading import Section, Snapshot, differing
from agentrl.store.admin.check.report import Findings, Invariant, Problem
from agentrl.store.mechanics.blobs import moved_fields
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import MODEL_CALL, RECORD, TASK

SETTLED = frozenset({RecordStatus.SCORED, RecordStatus.READY, RecordStatus.ABANDONED})
"""A Record with a score."""
ENDED = frozenset(RecordStatus) - {
    RecordStatus.CREATED, RecordStatus.RUNNING, RecordStatus.COMPLETED, RecordStatus.SCORING,
}  # fmt: skip
"""A Record that no sampler writes any more."""
DEAD = ENDED - SETTLED
"""A Record of an attempt that ended without a score."""
TERMINAL = frozenset({SlotStatus.SCORED, SlotStatus.FAILED})
_LIVING = frozenset({SlotStatus.RUNNING, SlotStatus.SAMPLED, SlotStatus.SCORED})
"""A slot whose last attempt is alive."""

RECORD_FIELDS = {
    "task": 1, "traj_id": 1, "attempt": 1, "split": 1, "epoch": 1, "status": 1, "score": 1,
    "score_details.scorer": 1, "stop_reason": 1, "failure.kind": 1, "abandoned_because": 1, "advantage": 1,
    "score_details.turn_rewards": 1, "score_details.role_rewards": 1, "score_details.call_roles": 1,
    "turn_advantages": 1,
    "turns": 1, "tool_calls": 1, "context_resets": 1, "prompt_tokens": 1, "generated_tokens": 1,
    "min_version": 1, "max_version": 1, "owner": 1, "traj": 1, "trained_count": 1, "last_trained_step": 1,
    "scored_at": 1, "pruned_at": 1,
}  # fmt: skip
"""The fields of a Record that the rules need; texts are left out."""

_BYTES = 4
"""The size of one packed id and of one packed logprob."""
_PACKED = ("context_ids", "output_ids", "logprobs")

_CALL_FIELDS = {
    "record": 1, "index": 1, "parent": 1, "drops_thoughts": 1, "opens_branch": 1, "fixed.model": 1,
    "status": 1, "versions": 1, "prompt_tokens": 1,
    "generated_tokens": 1, "created_at": 1, "packed_in_gridfs": 1,
    "executions": {"$size": "$tool_executions"},
    **{name: {"$binarySize": f"${name}"} for name in _PACKED},
}  # fmt: skip


def slot_problems(task: Json, records: Sequence[Json], is_final: bool) -> Iterator[Problem]:
    """Yield contradictions between the slots of a Task and its Records of every attempt."""
    slots = {slot["traj_id"]: slot for slot in task["slots"]}
    if len(slots) != len(task["slots"]):
        numbers = [slot["traj_id"] for slot in task["slots"]]
        yield Problem(f"Task {task['_id']}", "slots with unique numbers", sorted(slots), numbers)
    attempts: dict[int, dict[int, Json]] = {number: {} for number in slots}
    for record in records:
        slot = slots.get(record["traj_id"])
        if slot is None:
            yield Problem(f"Record {record['_id']}", "its slot", f"one of {sorted(slots)}", record["traj_id"])
            continue
        attempts[record["traj_id"]][record["attempt"]] = record
        yield from _belonging(task, slot, record)
    for number, slot in slots.items():
        name = f"Task {task['_id']} slot {number}"
        if is_final and slot["status"] not in TERMINAL:
            yield Problem(name, "terminal at the end of the run", "scored or failed", slot["status"])
        yield from _attempts(name, task, slot, attempts[number])


def _belonging(task: Json, slot: Json, record: Json) -> Iterator[Problem]:
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
    if record["attempt"] > slot["attempt"]:
        yield Problem(name, "no attempt beyond its slot's", f"at most {slot['attempt']}", record["attempt"])


def _attempts(name: str, task: Json, slot: Json, attempts: Mapping[int, Json]) -> Iterator[Problem]:
    current = attempts.get(slot["attempt"])
    if slot["status"] in (SlotStatus.SAMPLED, SlotStatus.SCORED):
        yield from _ended(name, task, slot, current)
    elif slot["status"] == SlotStatus.RUNNING and current is not None:
        if current["status"] in ENDED:
            what = "a running Record, since its slot is running"
            yield Problem(f"Record {current['_id']}", what, "created to scoring", current["status"])
        yield from differing(
            f"Record {current['_id']}", [("the owner of its slot", slot.get("owner"), current.get("owner"))]
        )
    living = slot["attempt"] if slot["status"] in _LIVING else None
    for number, record in attempts.items():
        if number != living and record["status"] not in DEAD:
            what = f"dead, since attempt {number} is not the live one of its slot"
            yield Problem(f"Record {record['_id']}", what, " or ".join(sorted(DEAD)), record["status"])


def _ended(name: str, task: Json, slot: Json, record: Json | None) -> Iterator[Problem]:
    """Check a slot that is sampled or scored, and the Record of its attempt."""
    key = record_key(task["_id"], slot["traj_id"], slot["attempt"])
    yield from differing(name, [("record_id of its attempt", key, slot.get("record_id"))])
    if slot["status"] == SlotStatus.SAMPLED:
        status = "none" if record is None else record["status"]
        if status != RecordStatus.COMPLETED:
            what = "a completed Record, since it waits for a score"
            yield Problem(name, what, RecordStatus.COMPLETED, status)
        return
    if record is None:
        yield Problem(name, "one live Record", key, "none")
        return
    if record["status"] not in SETTLED:
        what = "settled, since its slot is scored"
        yield Problem(f"Record {record['_id']}", what, " or ".join(sorted(SETTLED)), record["status"])
    yield from differing(
        f"Record {record['_id']}", [("the score of its slot", slot.get("score"), record.get("score"))]
    )


async def read_call_sizes(moment: Snapshot, record_ids: Sequence[str]) -> dict[str, list[Json]]:
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


async def _sizes(moment: Snapshot, call: Json) -> Json:
    names = moved_fields(call)
    files = await moment.by_id(f"{MODEL_CALL}.packed.files", names, {"length": 1})
    return {name: files[key]["length"] if key in files else None for key, name in names.items()}


def call_problems(record: Json, calls: Sequence[Json]) -> Iterator[Problem]:
    """Yield contradictions between a Record and its model calls."""
    expected = list(record["traj"])
    keys = [call["_id"] for call in calls]
    name = f"Record {record['_id']}"
    yield from differing(
        name,
        [
            ("its model calls in the order of traj", expected, keys),
            ("gap-free indexes of its calls", list(range(len(calls))), [call["index"] for call in calls]),
            ("calls with its _id as prefix", [f"{record['_id']}/{call['index']}" for call in calls], keys),
        ],
    )
    yield from differing(name, _sums(record, calls))
    earlier: dict[str, Json] = {}
    for call in calls:
        yield from _call(call, earlier)
        earlier[call["_id"]] = call


def _sums(record: Json, calls: Sequence[Json]) -> list[tuple[str, Any, Any]]:
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


def _call(call: Json, earlier: dict[str, Json]) -> Iterator[Problem]:
    name = f"DispatchedSamplingTask {call['_id']}"
    parent = earlier.get(call["parent"]) if call["parent"] is not None else None
    if call["parent"] is not None and parent is None:
        yield Problem(name, "a parent among the calls before it", sorted(earlier), call["parent"])
        return
    for field in {*_PACKED, *moved_fields(call).values()}:
        if call[field] is None:
            yield Problem(name, f"its {field} in GridFS", "a file", "none")
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
        yield Problem(name, "policy versions that cover its tokens", f"[0, {generated // _BYTES})", spans)


class _Parents(Section):
    """Checks that the documents named by the field ``order`` exist in the collection ``parents``."""

    parents: ClassVar[str]
    page_size: ClassVar[int] = 5000

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        named = {document[self.order] for document in page}
        for key in sorted(named - await moment.ids(self.parents, named)):
            name, what = f"{self.collection} of {key}", f"the {self.parents} that it belongs to"
            findings.wrong(Invariant.TRAJECTORIES, key, name, what, key, "none")


class RecordParents(_Parents):
    """Checks that every Record has its Task."""

    collection = RECORD
    parents = TASK
    order = "task"
    fields: ClassVar = {"task": 1, "_id": 0}


class CallParents(_Parents):
    """Checks that every model call has its Record."""

    collection = MODEL_CALL
    parents = RECORD
    order = "record"
    fields: ClassVar = {"record": 1, "_id": 0}
