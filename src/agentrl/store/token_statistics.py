"""Store the importance ratios and entropies of the tokens that a step trained."""

from __future__ import annotations

from collections.abc import Sequence

from pymongo import ReplaceOne

from agentrl.documents.token_statistics import TokenStatistics
from agentrl.store.connection import Repository, database_call
from agentrl.store.names import TOKEN_STATISTICS


class TokenStatisticsWrites(Repository):
    """The trainer's calls on TokenStatistics; ``TokenReads`` reads them."""

    @database_call
    async def put(self, items: Sequence[TokenStatistics]) -> None:
        """Store the statistics of a step, and replace those that exist. Idempotent."""
        writes = [ReplaceOne({"_id": item.id}, item.to_document(), upsert=True) for item in items]
        if writes:
            await self._collection(TOKEN_STATISTICS).bulk_write(writes, ordered=False)
