"""Cut long tails: end trajectories that are still running after the steps that they were sampled for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentrl.documents.record import Failure
from agentrl.documents.task import Claim
from agentrl.errors import LeaseLostError
from agentrl.rollout.held_claims import HeldClaims
from agentrl.store.mechanics.retry import log_store_errors
from agentrl.store.names import STEP

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

KIND = "cut"
"""``Record.failure.kind`` of a trajectory that was cut."""

WATCH_SECONDS = 10.0
"""Interval between looks for steps when the change stream reports none."""


class Tails:
    """Ends the trajectories of one sampler that are too late for training.

    A trajectory that began after step s is too late once step s + ``after_steps`` is committed: its first
    tokens are then older than ``--max_staleness`` allows. Its slot is not sampled again. Its group is
    finalized with the trajectories that have a score.
    """

    def __init__(self, store: Store, held: HeldClaims, after_steps: int) -> None:
        self._store = store
        self._held = held
        self._after_steps = after_steps
        self._step = 0
        self._begun: dict[str, int] = {}
        """Record → last committed step when its trajectory began."""

    def begin(self, claim: Claim) -> None:
        """Note that a trajectory begins."""
        self._begun[claim.record_id] = self._step

    async def run(self, freed: Callable[[], None]) -> None:
        """Cut trajectories after each step, until cancelled; call ``freed`` when some were cut."""
        while True:
            with log_store_errors(logger, "steps cannot be read; no trajectory is cut"):
                last = await self._store.training.last_step()
                self._step = 0 if last is None else last.step
                if await self._cut():
                    freed()
            await self._store.wait_for_change(STEP, timeout=WATCH_SECONDS)

    async def _cut(self) -> int:
        running = {claim.record_id for claim in self._held.claims}
        self._begun = {record: step for record, step in self._begun.items() if record in running}
        late = {record for record, step in self._begun.items() if self._step >= step + self._after_steps}
        claims = await self._held.cancel(late)
        why = f"step {self._step} was trained while it was running (--tail_policy {KIND})"
        await asyncio.gather(*(self._fail(claim, why) for claim in claims))
        return len(claims)

    async def _fail(self, claim: Claim, why: str) -> None:
        logger.info("trajectory cut", extra={"record": claim.record_id, "why": why})
        try:
            await self._store.attempts.fail(
                claim, Failure(kind=KIND, message=why), max_attempts=1, backoff_seconds=0.0
            )
        except LeaseLostError:
            logger.info("the claim was lost before it was cut", extra={"record": claim.record_id})
