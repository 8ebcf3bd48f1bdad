"""Invariant 1: every slot ends terminal, and a scored one has exactly one live Record with its score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.documents.task import record_key
from agentrl.store.admin.check.findings import Problem
from agentrl.store.admin.check.reading import differing
from agentrl.store.connection import Json

SETTLED = frozenset({RecordStatus.SCORED, RecordStatus.READY, RecordStatus.ABANDONED})
"""A Record with a score."""
ENDED = frozenset(RecordStatus) - {
    RecordStatus.CREATED, RecordStatus.RUNNING, RecordStatus.COMPLETED, RecordStatus.SCORING,
}  # fmt: skip
"""A Record that nobody writes any more."""
DEAD = ENDED - SETTLED
"""A Record of an attempt that came to nothing."""
TERMINAL = frozenset({SlotStatus.SCORED, SlotStatus.FAILED})

RECORD_FIELDS = {
    "task": 1, "traj_id": 1, "attempt": 1, "split": 1, "epoch": 1, "status": 1, "score": 1,
    "score_details.scorer": 1, "stop_reason": 1, "failure.kind": 1, "abandoned_because": 1, "advantage": 1,
    "turns": 1, "tool_calls": 1, "context_resets": 1, "prompt_tokens": 1, "generated_tokens": 1,
    "min_version": 1, "max_version": 1, "owner": 1, "traj": 1, "trained_count": 1, "last_trained_step": 1,
    "scored_at": 1, "pruned_at": 1,
}  # fmt: skip
"""What the rules need of a Record: neither its texts nor the scorer's."""


def slot_problems(task: Json, records: Sequence[Json], is_final: bool) -> Iterator[Problem]:
    """What is wrong between the slots of a Task and its Records of every attempt."""
    slots = {slot["traj_id"]: slot for slot in task["slots"]}
    if len(slots) != len(task["slots"]):
        numbers = [slot["traj_id"] for slot in task["slots"]]
        yield Problem(f"Task {task['_id']}", "slots with a number of their own", sorted(slots), numbers)
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
            ("an _id made of its Task, slot and attempt", key, record["_id"]),
            ("the split of its Task", task["split"], record["split"]),
            ("the epoch of its Task", task["epoch"], record["epoch"]),
        ],
    )
    if record["attempt"] > slot["attempt"]:
        yield Problem(name, "no attempt beyond its slot's", f"at most {slot['attempt']}", record["attempt"])


def _attempts(name: str, task: Json, slot: Json, attempts: Mapping[int, Json]) -> Iterator[Problem]:
    current = attempts.get(slot["attempt"])
    if slot["status"] == SlotStatus.SCORED:
        yield from _scored(name, task, slot, current)
    elif slot["status"] == SlotStatus.RUNNING and current is not None:
        if current["status"] in ENDED:
            what = "a Record in work while its slot runs"
            yield Problem(f"Record {current['_id']}", what, "created to scoring", current["status"])
        yield from differing(
            f"Record {current['_id']}", [("the owner of its slot", slot.get("owner"), current.get("owner"))]
        )
    living = slot["attempt"] if slot["status"] in (SlotStatus.SCORED, SlotStatus.RUNNING) else None
    for number, record in attempts.items():
        if number != living and record["status"] not in DEAD:
            what = f"dead, since attempt {number} is not the live one of its slot"
            yield Problem(f"Record {record['_id']}", what, " or ".join(sorted(DEAD)), record["status"])


def _scored(name: str, task: Json, slot: Json, record: Json | None) -> Iterator[Problem]:
    key = record_key(task["_id"], slot["traj_id"], slot["attempt"])
    yield from differing(name, [("record_id of its attempt", key, slot.get("record_id"))])
    if record is None:
        yield Problem(name, "one live Record", key, "none")
        return
    if record["status"] not in SETTLED:
        what = "settled, since its slot is scored"
        yield Problem(f"Record {record['_id']}", what, " or ".join(sorted(SETTLED)), record["status"])
    yield from differing(
        f"Record {record['_id']}", [("the score of its slot", slot.get("score"), record.get("score"))]
    )
