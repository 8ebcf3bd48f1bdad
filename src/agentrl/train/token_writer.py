"""Write the statistics of single tokens beside the next step: for display, never in the way of training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.documents.model_call import pack_halves
from agentrl.documents.training import TokenSpan, TokenStatistics, TrainStep, statistics_key
from agentrl.errors import AgentRLError
from agentrl.store.mechanics.retry import retry_outages

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.train.token_recorder import TokenValues

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long ``close`` waits for the last write."""


class TokenWriter:
    """Writes one committed step at a time, in the background. What fails or is too slow is a warning."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writing: asyncio.Task[None] | None = None

    def start(self, step: TrainStep, tokens: Sequence[TokenValues]) -> None:
        """Begin to write the values of a committed step; skip them while an earlier step is being written."""
        if not tokens:
            return
        if self._writing is not None and not self._writing.done():
            logger.warning(
                "step %d: its token statistics are not stored, because the database is still writing those of"
                " an earlier step (a lower --token_statistics_mib writes less)", step.step,
            )  # fmt: skip
            return
        self._writing = asyncio.create_task(self._write(step, tokens))

    async def close(self) -> None:
        """Wait for the last write, at most ``CLOSE_SECONDS``; then give it up."""
        if self._writing is None:
            return
        done, _ = await asyncio.wait([self._writing], timeout=CLOSE_SECONDS)
        if not done:
            self._writing.cancel()
            logger.warning("the token statistics of the last step are not stored: the database is too slow")

    async def _write(self, step: TrainStep, tokens: Sequence[TokenValues]) -> None:
        with retry_outages(0):
            try:
                documents = await asyncio.to_thread(to_documents, step, tokens)
                await self._store.token_statistics.put(documents)
            except AgentRLError as error:
                logger.warning("step %d: its token statistics are not stored: %s", step.step, error.message)


def to_documents(step: TrainStep, tokens: Sequence[TokenValues]) -> list[TokenStatistics]:
    """Return the documents of a step, one per trajectory."""
    return [
        TokenStatistics(
            id=statistics_key(values.record, step.id),
            record=values.record,
            train_step=step.id,
            step=step.step,
            spans=tuple(TokenSpan(start=span.start, end=span.end) for span in values.spans),
            log_ratios=pack_halves(values.log_ratio),
            entropies=pack_halves(values.entropy),
        )
        for values in tokens
    ]
