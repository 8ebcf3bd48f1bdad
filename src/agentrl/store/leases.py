"""Which claims still hold, by the server's clock."""

from __future__ import annotations

from collections.abc import Sequence

from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.task import Claim
from agentrl.errors import LeaseLostError
from agentrl.store import slots
from agentrl.store.connection import Connection
from agentrl.store.names import TASK


async def lost_claims(
    connection: Connection, claims: Sequence[Claim], session: AsyncClientSession | None = None
) -> list[Claim]:
    """Those whose lease has run out or whose slot has passed on."""
    live = {"$filter": {"input": "$slots", "as": "slot", "cond": slots.LIVE}}
    ids = list({claim.task.id for claim in claims})
    tasks = (
        await connection.collection(TASK)
        .find({"_id": {"$in": ids}}, {"slots": live}, session=session)
        .to_list()
    )
    held = {
        (task["_id"], slot["traj_id"], slot["attempt"], slot["owner"])
        for task in tasks
        for slot in task["slots"]
    }
    return [each for each in claims if (each.task.id, each.traj_id, each.attempt, each.owner) not in held]


def lease_lost(claim: Claim) -> LeaseLostError:
    """The error of a write under a claim that no longer holds."""
    return LeaseLostError(
        f"the claim of {claim.owner} on {claim.record_id} has run out or passed to another sampler",
        hint="nothing is lost: another attempt replaces this one; if it happens often, raise --lease_seconds",
    )
