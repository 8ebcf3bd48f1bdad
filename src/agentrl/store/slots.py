"""Pipeline expressions that change one slot of a Task and derive its status and lease deadline with it.

Times are the server's (``$$NOW``). Every value that comes from outside goes through ``$literal``, so that no
text can be read as an expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.documents.task import Claim

Json = dict[str, Any]
LEASE_DEADLINE = "lease_deadline"
"""The field of a Task that says when the first lease of its slots runs out; null where none is running."""
_TERMINAL = [SlotStatus.SCORED.value, SlotStatus.FAILED.value]
ATTEMPTS: Json = {"$subtract": ["$$slot.attempt", {"$ifNull": ["$$slot.released", 0]}]}
"""Attempts of ``$$slot`` that count towards ``max_attempts``."""
EXPIRED: Json = {
    "$and": [
        {"$eq": ["$$slot.status", SlotStatus.RUNNING.value]},
        {"$lte": ["$$slot.lease_expires_at", "$$NOW"]},
    ]
}
"""Whether the lease of ``$$slot`` has run out, and nobody has noticed."""
LIVE: Json = {
    "$and": [
        {"$eq": ["$$slot.status", SlotStatus.RUNNING.value]},
        {"$gt": ["$$slot.lease_expires_at", "$$NOW"]},
    ]
}
"""Whether the lease of ``$$slot`` is alive."""
OPEN: Json = {
    "$and": [
        {"$eq": ["$$slot.status", SlotStatus.OPEN.value]},
        {"$lte": [{"$ifNull": ["$$slot.not_before", "$$NOW"]}, "$$NOW"]},
    ]
}
"""Whether ``$$slot`` is free, and its wait after a failure is over."""


def literal(value: Any) -> Json:
    """``value`` as a constant of an expression."""
    return {"$literal": value}


def after(seconds: float | Json) -> Json:
    """The server's time in ``seconds``."""
    milliseconds = round(seconds * 1000) if isinstance(seconds, (int, float)) else seconds
    return {"$add": ["$$NOW", milliseconds]}


def expired(max_attempts: int) -> Json:
    """Whether the lease of ``$$slot`` has run out while it has attempts left."""
    return {"$and": [EXPIRED, {"$lt": [ATTEMPTS, max_attempts]}]}


def any_slot(condition: Json) -> Json:
    """A filter: some slot fulfils ``condition`` (an expression over ``$$slot``)."""
    matches = {"$map": {"input": "$slots", "as": "slot", "in": condition}}
    return {"$expr": {"$anyElementTrue": [matches]}}


def overdue(condition: Json) -> Json:
    """A filter: a lease has run out, and some slot fulfils ``condition``. It uses an index on LEASE_DEADLINE.

    A Task without a deadline passes the first part: the second decides.
    """
    passed = {"$lte": [f"${LEASE_DEADLINE}", "$$NOW"]}
    return {"$expr": {"$and": [passed, any_slot(condition)["$expr"]]}}


def claim_slots(condition: Json, owners: Sequence[str], lease_seconds: float) -> list[Json]:
    """Update: give the first slots that fulfil ``condition`` to ``owners``, one each, as many as there are.

    ``last_claim`` lists them: which one, and who held it before.
    """
    free = {"$filter": {"input": "$slots", "as": "slot", "cond": condition}}
    taken = {
        "$map": {
            "input": {"$slice": [free, len(owners)]},
            "as": "slot",
            "in": {"traj_id": "$$slot.traj_id", "previous_owner": "$$slot.owner"},
        }
    }
    place = {"$indexOfArray": ["$last_claim.traj_id", "$$slot.traj_id"]}
    attempt = {"$add": ["$$slot.attempt", 1]}
    record = {
        "$concat": [
            "$_id", "/", {"$toString": "$$slot.traj_id"}, "/", {"$toString": attempt},
        ]
    }  # fmt: skip
    fields = {
        "status": SlotStatus.RUNNING.value, "attempt": attempt,
        "owner": {"$arrayElemAt": [literal(list(owners)), place]},
        "lease_expires_at": after(lease_seconds), "not_before": None, "record_id": record,
    }  # fmt: skip
    return [
        {"$set": {"last_claim": taken, "admission": None}},
        {"$set": {"slots": _map_slots({"$gte": [place, 0]}, fields)}},
        *_derive_status(),
    ]


def change_slot(claim: Claim, fields: Json) -> list[Json]:
    """Update: set ``fields`` (expressions over ``$$slot``) of the claimed slot."""
    return [{"$set": {"slots": _map_slots(_is_claimed(claim), fields)}}, *_derive_status()]


def change_slots(condition: Json, fields: Json) -> list[Json]:
    """Update: set ``fields`` of every slot that fulfils ``condition``."""
    return [{"$set": {"slots": _map_slots(condition, fields)}}, *_derive_status()]


def renew_lease(claim: Claim, lease_seconds: float) -> list[Json]:
    """Update: let the claim's lease run for ``lease_seconds`` from now."""
    fields = {"lease_expires_at": after(lease_seconds)}
    return [{"$set": {"slots": _map_slots(_is_claimed(claim), fields)}}, _derive_deadline()]


def held(claim: Claim) -> Json:
    """A filter: the Task whose slot the claim still holds, under a lease that has not run out."""
    live = {"$and": [_is_claimed(claim), LIVE]}
    return {**owned(claim), **any_slot(live)}


def owned(claim: Claim) -> Json:
    """A filter: the Task whose slot has not passed on from the claim, be its lease alive or not."""
    return {
        "_id": claim.task.id,
        "slots": {
            "$elemMatch": {
                "traj_id": claim.traj_id, "attempt": claim.attempt, "owner": claim.owner,
                "status": SlotStatus.RUNNING.value,
            }
        },
    }  # fmt: skip


def _is_claimed(claim: Claim) -> Json:
    return {
        "$and": [
            {"$eq": ["$$slot.traj_id", claim.traj_id]},
            {"$eq": ["$$slot.attempt", claim.attempt]},
            {"$eq": ["$$slot.owner", literal(claim.owner)]},
            {"$eq": ["$$slot.status", SlotStatus.RUNNING.value]},
        ]
    }


def _map_slots(condition: Json, fields: Json) -> Json:
    changed = {"$cond": [condition, {"$mergeObjects": ["$$slot", fields]}, "$$slot"]}
    return {"$map": {"input": "$slots", "as": "slot", "in": changed}}


def _derive_status() -> list[Json]:
    terminal = {"$map": {"input": "$slots", "as": "slot", "in": {"$in": ["$$slot.status", _TERMINAL]}}}
    status = {"$cond": [{"$allElementsTrue": [terminal]}, TaskStatus.WAITING.value, TaskStatus.RUNNING.value]}
    return [{"$set": {"status": status, "updated_at": "$$NOW"}}, _derive_deadline()]


def _derive_deadline() -> Json:
    running = {"$eq": ["$$slot.status", SlotStatus.RUNNING.value]}
    leased = {"$filter": {"input": "$slots", "as": "slot", "cond": running}}
    ends = {"$map": {"input": leased, "as": "slot", "in": "$$slot.lease_expires_at"}}
    return {"$set": {LEASE_DEADLINE: {"$min": ends}}}
