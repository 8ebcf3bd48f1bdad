"""Limit the leases that may be taken over after the database was away: their owners could not renew them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from bson import ObjectId
from pymongo import DESCENDING

from agentrl.errors import DATABASE
from agentrl.store import slots
from agentrl.store.connection import Json, Repository
from agentrl.store.names import OUTAGE

RENEWAL_SECONDS = 8.0
"""Time in which every living process renews its leases after an outage; it retries at least every 5 s."""


class Availability(Repository):
    """Tells since when the database has been available to everybody, not only to this process."""

    async def expired(self, condition: Json, grace_seconds: float) -> Json | None:
        """Return ``condition`` over ``$$slot``, limited to leases that their owners could have renewed.

        Within ``grace_seconds`` after an outage these are the leases that expired ``RENEWAL_SECONDS`` after
        its end or later. None: no lease may be taken over now. This process has just seen an outage end, or
        has just started: others may see one end now.
        """
        age = time.monotonic() - self._connection.opened_at
        if self._connection.outage.seconds_since < grace_seconds or age < min(grace_seconds, RENEWAL_SECONDS):
            return None
        back = await self._back_at(grace_seconds)
        if back is None:
            return condition
        renewable = slots.literal(back + timedelta(seconds=RENEWAL_SECONDS))
        return {"$and": [condition, {"$gt": ["$$slot.lease_expires_at", renewable]}]}

    async def _back_at(self, seconds: float) -> datetime | None:
        """Return when the database came back; None if that is more than ``seconds`` ago.

        The server knows its own start; processes that have seen an outage have stored its end. Times are the
        server's.
        """
        hello = await self._connection.client.admin.command("hello")
        earliest = hello["localTime"].replace(tzinfo=UTC) - timedelta(seconds=seconds)
        ended = await self._collection(OUTAGE).find_one(
            {"dependency": str(DATABASE), "ended_at": {"$gte": earliest}}, {"ended_at": 1},
            sort=[("ended_at", DESCENDING)],
        )  # fmt: skip
        times = [ended["ended_at"]] if ended else []
        process = (hello.get("topologyVersion") or {}).get("processId")
        if isinstance(process, ObjectId) and process.generation_time >= earliest:
            times.append(process.generation_time)
        return max(times, default=None)
