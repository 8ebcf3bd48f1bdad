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

from agentrl.concurrency import background
from agentrl.errors import LeaseLostError, StoreError, StoreUnavailableError
from agentrl.store.mechanics.connection import Json

logger = logging.getLogger(__name__)

FREE: Json = {"owner": None, "lease_expires_at": None}
"""The owner and the lease of what nobody holds."""

_RENEWALS_PER_LEASE = 3

_MAX_DOUBLINGS = 9


def literal(value: Any) -> Json:
    """Return ``value`` as a constant of an expression."""
    return {"$literal": value}


def after(seconds: float | Json) -> Json:
    """Return the expression for the server's time plus ``seconds``; an expression is in milliseconds."""
    milliseconds = round(seconds * 1000) if isinstance(seconds, (int, float)) else seconds
    return {"$add": ["$$NOW", milliseconds]}


def after_backoff(seconds: float, doublings: Json) -> Json:
    """Return the expression for the server's time plus ``seconds``, doubled up to ``doublings`` times.

    At most 9 doublings count. The wait varies randomly by ±50 %, so that slots do not come back all at once.
    """
    bounded = {"$min": [doublings, _MAX_DOUBLINGS]}
    spread_ms = seconds * 1000 * random.uniform(0.5, 1.5)
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
    return background(keep_renewed(renew, seconds / _RENEWALS_PER_LEASE, what))


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
