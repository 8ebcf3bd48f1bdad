"""Handing unfinished slots back: many claims in one transaction, so that a shutdown is bounded."""

from __future__ import annotations

from collections.abc import Sequence

from pymongo import UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.status import SlotStatus
from agentrl.documents.task import Claim
from agentrl.store import slots
from agentrl.store.attempts import end_records
from agentrl.store.connection import Json, Repository, database_call
from agentrl.store.leases import lease_lost, lost_claims
from agentrl.store.names import TASK

_PER_TRANSACTION = 256

FREE: Json = {"owner": None, "lease_expires_at": None}
"""The fields of a slot that nobody holds."""


class Releases(Repository):
    """How a sampler gives up claims that it has not finished."""

    async def release(self, claim: Claim) -> None:
        """Hand one slot back, as ``release_all``. Raises LeaseLostError where the claim no longer holds."""
        if await self.release_all([claim]):
            raise lease_lost(claim)

    @database_call
    async def release_all(self, claims: Sequence[Claim]) -> list[Claim]:
        """Hand unfinished slots back; returns the claims that no longer held, whose slots are unchanged.

        A slot is open at once, the attempt does not count, and its Record is RELEASED. Up to 256 claims share
        a transaction.
        """
        lost: list[Claim] = []
        for start in range(0, len(claims), _PER_TRANSACTION):
            lost += await self._release(claims[start : start + _PER_TRANSACTION])
        return lost

    async def _release(self, claims: Sequence[Claim]) -> list[Claim]:
        fields = {
            **FREE, "status": SlotStatus.OPEN.value,
            "released": {"$add": [{"$ifNull": ["$$slot.released", 0]}, 1]},
        }  # fmt: skip

        async def write(session: AsyncClientSession) -> list[Claim]:
            lost = await lost_claims(self._connection, claims, session)
            gone = {claim.record_id for claim in lost}
            held = [claim for claim in claims if claim.record_id not in gone]
            if held:
                updates = [UpdateOne(slots.owned(claim), slots.change_slot(claim, fields)) for claim in held]
                await self._collection(TASK).bulk_write(updates, ordered=True, session=session)
                await end_records(self._connection, held, None, session)
            return lost

        return await self._connection.transaction(write)
