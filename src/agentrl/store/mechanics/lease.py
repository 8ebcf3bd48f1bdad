"""Lease a slot, a request or a document to one owner at a time: take it, renew it, take over an expired one.

A lease is an owner and a time of expiry. Times are the server's (``$$NOW``), so the clocks of machines do
not matter. Every value from outside goes through ``literal``: MongoDB never evaluates text as an expression.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from pymongo import ReturnDocument
from pymongo.asynchronous.collection import AsyncCollection

from agentrl.base.concurrency import background
from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.documents.task import Claim, Slot, Task
from agentrl.errors import LeaseLostError, StoreError, StoreUnavailableError
from agentrl.store.mechanics.connection import TASK, Connection, Json

logger = logging.getLogger(__name__)

FREE: Json = {"owner": None, "lease_expires_at": None}
"""The owner and the lease of what nobody holds."""

RENEWALS_PER_LEASE = 3

_MAX_DOUBLINGS = 9


def literal(value: Any) -> Json:
    """Return ``value`` as a constant of an expression."""
    return {"$literal": value}


def after(seconds: float | Json) -> Json:
    """Return the expression for the server's time plus ``seconds``; an expression is in milliseconds."""
    milliseconds = round(seconds * 1000) if isinstance(seconds, (int, float)) else seconds
    return {"$add": ["$$NOW", milliseconds]}


def after_backoff(seconds: float, doublings: Json | str, *, jitter: float = 0.5) -> Json:
    """Return the expression for the server's time plus ``seconds``, doubled up to ``doublings`` times.

    At most 9 doublings count. The wait varies randomly by the share ``jitter`` of it, so that slots do not
    come back all at once. The server computes what ``Backoff`` computes in a process.
    """
    bounded = {"$min": [doublings, _MAX_DOUBLINGS]}
    spread_ms = seconds * 1000 * random.uniform(1 - jitter, 1 + jitter)
    return after({"$toLong": {"$multiply": [spread_ms, {"$pow": [2, bounded]}]}})


def expired(until: str = "$lease_expires_at") -> Json:
    """Return the condition that the lease whose expiry is the field ``until`` has expired."""
    return {"$lte": [until, "$$NOW"]}


def live(until: str = "$lease_expires_at") -> Json:
    """Return the condition that the lease whose expiry is the field ``until`` has not expired."""
    return {"$gt": [until, "$$NOW"]}


@dataclass(frozen=True, slots=True)
class DocumentLease:
    """The lease of one document. ``attempt`` counts its owners: writes of an earlier one are refused."""

    collection: AsyncCollection[Json]
    key: str
    lost: Callable[[int], LeaseLostError]
    """Makes the error of a write under an attempt that another has replaced."""

    async def take(
        self, owner: str, seconds: float, fields: Json, *, or_if: Sequence[Json] = (),
        only_if: Json | None = None,
    ) -> Json | None:  # fmt: skip
        """Take the lease and set ``fields`` (expressions); return the document, None if it is not free.

        It is free if nobody holds it, if ``owner`` does, if it has expired or if one of ``or_if`` is true.
        """
        mine = {"$eq": ["$owner", literal(owner)]}
        free: Json = {"$or": [{"$eq": ["$owner", None]}, mine, expired(), *or_if]}
        taken = {
            "attempt": {"$add": ["$attempt", 1]}, "owner": literal(owner), "lease_expires_at": after(seconds),
        }  # fmt: skip
        return await self.collection.find_one_and_update(
            {"_id": self.key, "$expr": free if only_if is None else {"$and": [free, only_if]}},
            [{"$set": {**taken, **fields}}],
            return_document=ReturnDocument.AFTER,
        )

    async def renew(self, attempt: int, seconds: float, fields: Json | None = None) -> None:
        """Extend the lease to ``seconds`` from now, and set ``fields``. Raises LeaseLostError."""
        changes = {**(fields or {}), "lease_expires_at": after(seconds)}
        # Refuse a lease that was released: a renewal that comes late would hold it for nobody.
        await self.write(attempt, [{"$set": changes}], {"owner": {"$ne": None}})

    async def write(self, attempt: int, update: Json | list[Json], only_if: Json | None = None) -> None:
        """Update the document as ``attempt``. Raises LeaseLostError, and writes nothing, if it is lost."""
        query = {"_id": self.key, "attempt": attempt, **(only_if or {})}
        result = await self.collection.update_one(query, update)
        if not result.matched_count:
            raise self.lost(attempt)


def renewed(
    renew: Callable[[], Awaitable[None]], seconds: float, what: str
) -> AbstractAsyncContextManager[None]:
    """Renew a lease of ``seconds`` by ``renew`` while the block runs; ``what`` names it in the log."""
    return background(keep_renewed(renew, seconds / RENEWALS_PER_LEASE, what))


async def keep_renewed(
    renew: Callable[[], Awaitable[None]], every: float, what: str, *, outages: bool = True
) -> None:
    """Call ``renew`` every ``every`` seconds until it raises LeaseLostError.

    Another StoreError is logged, and the next round tries again. Without ``outages``, an outage of the
    database is raised: ``retry_outages`` has already retried the call.
    """
    task = asyncio.current_task()
    assert task is not None
    while not task.cancelling():  # asyncio.wait_for of Python 3.11, in the driver, may swallow a cancellation
        await asyncio.sleep(every)
        try:
            await renew()
        except LeaseLostError as error:
            logger.error("%s", error.message)
            return
        except StoreError as error:
            if isinstance(error, StoreUnavailableError) and not outages:
                raise
            logger.warning("%s could not be renewed: %s", what, error.message)


LEASE_DEADLINE = "lease_deadline"
"""Field of a Task: the earliest expiry of its slots' leases; null if no slot is running."""
_TERMINAL = [SlotStatus.SCORED.value, SlotStatus.FAILED.value]
ATTEMPTS: Json = {"$subtract": ["$$slot.attempt", {"$ifNull": ["$$slot.released", 0]}]}
"""Number of attempts at ``$$slot`` that count towards ``max_attempts``."""
_RUNNING: Json = {"$eq": ["$$slot.status", SlotStatus.RUNNING.value]}
_RESTED: Json = {"$lte": [{"$ifNull": ["$$slot.not_before", "$$NOW"]}, "$$NOW"]}
SAMPLED: Json = {"$eq": ["$$slot.status", SlotStatus.SAMPLED.value]}
EXPIRED: Json = {"$and": [_RUNNING, expired("$$slot.lease_expires_at")]}
"""Condition: ``$$slot`` is running and its lease has expired."""
LIVE: Json = {"$and": [_RUNNING, live("$$slot.lease_expires_at")]}
"""Condition: ``$$slot`` is running and its lease has not expired."""
OPEN: Json = {"$and": [{"$eq": ["$$slot.status", SlotStatus.OPEN.value]}, _RESTED]}
"""Condition: ``$$slot`` may be claimed; its back-off after a failure is over."""
UNSCORED: Json = {"$and": [SAMPLED, _RESTED]}
"""Condition: ``$$slot`` waits for a score; its back-off after a failed attempt to score is over."""
QUEUED: Json = {**FREE, "status": SlotStatus.SAMPLED.value, "not_before": None}
"""The fields of a slot whose Record is sampled and waits for a score."""
RELEASED: Json = {
    **FREE, "status": SlotStatus.OPEN.value, "released": {"$add": [{"$ifNull": ["$$slot.released", 0]}, 1]},
}  # fmt: skip
"""The fields of a slot whose attempt ends without a fault of its own: the next claim goes on with it."""
ANEW: Json = {"begun": None, "deaths": 0, "died_at": None, "restarts": 0}
"""The fields of a slot whose next claim begins a new Record."""
REOPENED: Json = {
    **FREE, **ANEW, "status": SlotStatus.OPEN.value, "released": "$$slot.attempt", "not_before": None,
}  # fmt: skip
"""The fields of a failed slot that is opened again, with all its attempts."""


def any_slot(condition: Json) -> Json:
    """Return a filter for Tasks with a slot that satisfies ``condition`` (an expression over ``$$slot``)."""
    matches = {"$map": {"input": "$slots", "as": "slot", "in": condition}}
    return {"$expr": {"$anyElementTrue": [matches]}}


def overdue(condition: Json) -> Json:
    """Return a filter for Tasks with an expired lease and a slot that satisfies ``condition``.

    It uses the index on LEASE_DEADLINE, and reads no Task without a lease, as those are that wait for scores.
    """
    leased = {"$gt": [f"${LEASE_DEADLINE}", None]}
    return {"$expr": {"$and": [leased, expired(f"${LEASE_DEADLINE}"), any_slot(condition)["$expr"]]}}


def claim_slots(
    condition: Json, owners: Sequence[str], lease_seconds: float, *, new_attempt: bool = True,
    expired: bool = False,
) -> list[Json]:  # fmt: skip
    """Return the update that gives the first slots that satisfy ``condition`` to ``owners``, one each.

    The Task may have fewer such slots than owners. ``last_claim`` then lists each claimed slot and its
    previous owner. Without ``new_attempt`` the owner continues the slot's attempt: it scores its Record. The
    attempts of ``expired`` slots end without a fault of their own.
    """
    free = {"$filter": {"input": "$slots", "as": "slot", "cond": condition}}
    taken = {
        "$map": {
            "input": {"$slice": [free, len(owners)]},
            "as": "slot",
            "in": {"traj_id": "$$slot.traj_id", "previous_owner": "$$slot.owner"},
        }
    }
    index = {"$indexOfArray": ["$last_claim.traj_id", "$$slot.traj_id"]}
    attempt = {"$add": ["$$slot.attempt", int(new_attempt)]}
    begun = {"$ifNull": ["$$slot.begun", attempt]}
    record = {
        "$concat": [
            "$_id", "/", {"$toString": "$$slot.traj_id"}, "/", {"$toString": begun},
        ]
    }  # fmt: skip
    fields = {
        "status": SlotStatus.RUNNING.value, "attempt": attempt, "begun": begun,
        "owner": {"$arrayElemAt": [literal(list(owners)), index]},
        "lease_expires_at": after(lease_seconds), "not_before": None, "record_id": record,
        **({"scorings": 0} if new_attempt else {}),
        **({"released": RELEASED["released"]} if expired else {}),
    }  # fmt: skip
    # Choose in a stage of its own: expressions of one stage do not see what the others of it set.
    return [
        {"$set": {"last_claim": taken, "admission": None}},
        *change_slots({"$gte": [index, 0]}, fields),
    ]


def new_claims(document: Json, owners: Sequence[str]) -> list[Claim]:
    """Return the claims that ``claim_slots`` has just written into the Task."""
    task = Task.from_document(document)
    slots = {slot.traj_id: slot for slot in task.slots}
    traj_ids = [entry["traj_id"] for entry in document["last_claim"]]
    return [claim_of(task, slots[traj_id], owner) for traj_id, owner in zip(traj_ids, owners, strict=False)]


def claim_of(task: Task, slot: Slot, owner: str) -> Claim:
    """Return the claim of ``owner`` on a slot."""
    return Claim(task=task, traj_id=slot.traj_id, attempt=slot.attempt, begun=slot.begun, owner=owner)


def failed_or_open(max_attempts: int) -> Json:
    """Return the expression for a slot's status after a failed attempt."""
    return {
        "$cond": [
            {"$gte": [ATTEMPTS, max_attempts]}, SlotStatus.FAILED.value, SlotStatus.OPEN.value,
        ]
    }  # fmt: skip


def change_slot(claim: Claim, fields: Json) -> list[Json]:
    """Return the update that sets ``fields`` (expressions over ``$$slot``) of the claimed slot."""
    return change_slots(_is_claimed(claim), fields)


def change_slots(condition: Json, fields: Json) -> list[Json]:
    """Return the update that sets ``fields`` of every slot that satisfies ``condition``."""
    return [set_slots(condition, fields), *_derive_status()]


def remove_slots(traj_ids: Sequence[int], *, is_completed: bool) -> list[Json]:
    """Return the update that removes slots; a finalized group stays completed.

    If none of the others has been claimed, the Task is created again: its group is no longer open.
    """
    kept = {"$not": [{"$in": ["$$slot.traj_id", list(traj_ids)]}]}
    others = {"$filter": {"input": "$slots", "as": "slot", "cond": kept}}
    removed = {"$subtract": [{"$size": "$slots"}, {"$size": others}]}
    counted = {"$add": [{"$ifNull": ["$retracted", 0]}, removed]}
    change: Json = {"$set": {"slots": others, "retracted": counted, "updated_at": "$$NOW"}}
    if is_completed:
        return [change]
    attempts = {"$map": {"input": "$slots", "as": "slot", "in": {"$eq": ["$$slot.attempt", 0]}}}
    untouched = {"$and": [{"$gt": [{"$size": "$slots"}, 0]}, {"$allElementsTrue": [attempts]}]}
    created = {"$cond": [untouched, TaskStatus.CREATED.value, "$status"]}
    return [change, *_derive_status(), {"$set": {"status": created}}]


def renew_lease(claim: Claim, lease_seconds: float) -> list[Json]:
    """Return the update that extends the claim's lease to ``lease_seconds`` from now."""
    return [set_slots(_is_claimed(claim), {"lease_expires_at": after(lease_seconds)}), _derive_deadline()]


def held(claim: Claim) -> Json:
    """Return a filter for the claim's Task, if the claim holds its slot.

    The lease may have expired, for example while the database was away: the claim holds the slot until
    another process takes it over, and may renew the lease until then.
    """
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
            _RUNNING,
        ]
    }


def set_slots(condition: Json, fields: Json) -> Json:
    """Return the stage that sets ``fields`` of every slot that satisfies ``condition``."""
    changed = {"$cond": [condition, {"$mergeObjects": ["$$slot", fields]}, "$$slot"]}
    return {"$set": {"slots": {"$map": {"input": "$slots", "as": "slot", "in": changed}}}}


def _derive_status() -> list[Json]:
    terminal = {"$map": {"input": "$slots", "as": "slot", "in": {"$in": ["$$slot.status", _TERMINAL]}}}
    status = {"$cond": [{"$allElementsTrue": [terminal]}, TaskStatus.WAITING.value, TaskStatus.RUNNING.value]}
    return [{"$set": {"status": status, "updated_at": "$$NOW"}}, _derive_deadline()]


def _derive_deadline() -> Json:
    leased = {"$filter": {"input": "$slots", "as": "slot", "cond": _RUNNING}}
    ends = {"$map": {"input": leased, "as": "slot", "in": "$$slot.lease_expires_at"}}
    return {"$set": {LEASE_DEADLINE: {"$min": ends}}}


async def lost_claims(connection: Connection, claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims whose slot is not running any more or has another owner."""
    live = {"$filter": {"input": "$slots", "as": "slot", "cond": _RUNNING}}
    ids = list({claim.task.id for claim in claims})
    tasks = await connection.collection(TASK).find({"_id": {"$in": ids}}, {"slots": live}).to_list()
    held = {
        (task["_id"], slot["traj_id"], slot["attempt"], slot["owner"])
        for task in tasks
        for slot in task["slots"]
    }
    return [each for each in claims if (each.task.id, each.traj_id, each.attempt, each.owner) not in held]


def lease_lost(claim: Claim) -> LeaseLostError:
    """Return the error for a write under a claim that is lost."""
    return LeaseLostError(
        f"the lease of {claim.owner} on {claim.record_id} expired, and another sampler took the slot over",
        hint="nothing is lost: another attempt replaces this one; if it happens often, raise --lease_seconds",
    )


def slot_status(task: Task, claim: Claim) -> SlotStatus:
    """Return the status of the claim's slot."""
    return next(slot.status for slot in task.slots if slot.traj_id == claim.traj_id)


async def update_slot(connection: Connection, claim: Claim, fields: Json) -> Task:
    """Set ``fields`` of the claim's slot and return the Task. Raises LeaseLostError."""
    task = await connection.collection(TASK).find_one_and_update(
        held(claim), change_slot(claim, fields), return_document=ReturnDocument.AFTER
    )
    if task is None:
        raise lease_lost(claim)
    return Task.from_document(task)
