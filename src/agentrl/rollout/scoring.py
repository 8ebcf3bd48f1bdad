"""Score sampled trajectories: at once after sampling, or later from the queue in the database."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.base.concurrency import Backoff, background, wait_for_any
from agentrl.base.processes import stop_on_signals
from agentrl.base.registry import import_modules
from agentrl.base.spans import NO_SPAN, Span, tracer
from agentrl.base.user_code import allow, contain_call, contain_errors, is_allowed
from agentrl.config.load import Configs
from agentrl.config.schema import ClaimConfig, RunConfig, SamplingConfig, TaskConfig
from agentrl.documents.record import Failure
from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.documents.task import FEEDBACK, Claim
from agentrl.environments.session import names_of
from agentrl.errors import FailureError, LeaseLostError, ScorerError, StoreError
from agentrl.rollout.agent_io import failure_text
from agentrl.rollout.held_claims import HeldClaims, owner_name
from agentrl.rollout.outages import CallFailures, Outages, report_outages
from agentrl.scoring.scorers import ScorerContext, score_context, stored_context
from agentrl.store.client import open_existing
from agentrl.store.mechanics.retry import retry_outages

if TYPE_CHECKING:
    from agentrl.store.client import Store


logger = logging.getLogger(__name__)

_AT_ONCE = 16
"""Largest number of trajectories of one group that are claimed together."""

FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 2.0, 8.0
"""Interval of looks into the queue; it doubles with each look that finds nothing."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scores trajectories under a claim. A trajectory that gets no score stays sampled, and waits for one."""

    store: Store
    outages: Outages
    sampling: SamplingConfig
    claims: ClaimConfig
    _blame: dict[str, CallFailures] = field(default_factory=dict)
    """By Record id."""

    async def score(self, claim: Claim, context: ScorerContext, span: Span = NO_SPAN) -> bool:
        """Score a sampled trajectory; return whether it has a score now. ``span`` gets the score too.

        Raises ConfigError if this process cannot score the task, and LeaseLostError.
        """
        await self.store.records.advance(claim, RecordStatus.SCORING)
        return await self._score(claim, context, span)

    async def _score(self, claim: Claim, context: ScorerContext, span: Span) -> bool:
        scorer = claim.task.scorer
        if scorer == FEEDBACK and context.agent_score is None:
            status = await self.store.attempts.await_feedback(claim, self.sampling.feedback_hours)
            logger.info("no feedback" if status is SlotStatus.FAILED else "waits for feedback",
                        extra={"record": claim.record_id})  # fmt: skip
            return False
        try:
            result = await contain_errors(
                lambda: score_context(scorer, context, self.sampling.scorer_timeout_seconds),
                f"the score of {claim.record_id}",
                ScorerError,
            )
        except ScorerError as error:
            self.outages.scorer_failed(scorer, error)
            await self._postpone(claim, error)
            return False
        # Take an agent's own score for no sign of life: nobody has asked the judge for it.
        if context.agent_score is None:
            self.outages.scorer_succeeded(scorer)
        self._blame.pop(claim.record_id, None)
        span.set({"agentrl.score": result.score})
        await self.store.attempts.score(claim, result.score, result.details)
        logger.info("scored", extra={"record": claim.record_id, "score": result.score})
        return True

    async def score_stored(self, claim: Claim) -> bool:
        """Score a trajectory of the queue; return whether it has a score now.

        Its messages are read from its model calls.
        """
        try:
            if not all(map(is_allowed, names_of(claim.task))):
                allow(await self.store.imports.paths())
            # from here on it takes no other feedback than the one that is read now
            await self.store.records.advance(claim, RecordStatus.SCORING)
            record = await self.store.records.get(claim.record_id)
            if record is None:
                raise StoreError(
                    f"Record {claim.record_id} does not exist",
                    hint="list all inconsistencies: agentrl db check",
                )
            calls = await self.store.model_calls.by_record(claim.record_id)
            try:
                context = contain_call(
                    lambda: stored_context(claim.task, record, calls, self.sampling.agent_config_path),
                    f"reading {claim.record_id}",
                    ScorerError,
                )
            except ScorerError as error:
                await self._postpone(claim, error)
                return False
            if record.trace_id is None:
                return await self._score(claim, context, NO_SPAN)
            with tracer().span("score_stored", trace=record.trace_id) as span:
                return await self._score(claim, context, span)
        except LeaseLostError:
            logger.warning("the claim was lost; its score is dropped", extra={"record": claim.record_id})
            return False

    async def _postpone(self, claim: Claim, error: FailureError) -> None:
        counts = True
        if error.outage is not None:
            served = self.outages.breaker(error.outage).served
            counts = self._blame.setdefault(claim.record_id, CallFailures(served)).is_own(served)
        message = failure_text(error)
        status = await self.store.attempts.postpone(
            claim,
            Failure(kind=error.kind, message=message),
            max_scorings=self.claims.max_scorings,
            backoff_seconds=self.claims.retry_backoff_seconds,
            counts=counts,
        )
        if status is SlotStatus.FAILED:
            self._blame.pop(claim.record_id, None)
        logger.warning(
            "not scored; no attempts left" if status is SlotStatus.FAILED else "not scored; it waits",
            extra={"record": claim.record_id, "why": message},
        )


class ScoringQueue:
    """Claims sampled trajectories that wait for a score, and scores them."""

    def __init__(
        self, scoring: Scoring, *, split: str, owner: str, concurrency: int, only_scorer: str | None = None
    ) -> None:
        """Score up to ``concurrency`` trajectories of ``split``, or of a scorer in it, at a time."""
        self._only_scorer = only_scorer
        self._scoring = scoring
        self._store = scoring.store
        self._split = split
        self._owner = owner
        self._concurrency = concurrency
        self._held = HeldClaims(scoring.store, scoring.claims, owner, split, self._ended)
        self._woken = asyncio.Event()
        self._poll = Backoff("trajectories to score", FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS)
        self.scored = 0
        """Number of trajectories that this queue scored."""

    async def run(self, stop: asyncio.Event, *, until_empty: bool = False) -> None:
        """Score until ``stop``, or with ``until_empty`` until no trajectory waits for a score.

        Raises the error of a trajectory that this process cannot score, after its claims are released.
        """
        async with self._held.renewing():
            try:
                while not stop.is_set():
                    if self._held.error is not None:
                        raise self._held.error
                    if await self._claim():
                        continue
                    if until_empty and not self._held and not await self._store.claims.unscored(self._split):
                        return
                    await self._wait(stop)
            finally:
                await self._held.release()

    async def _claim(self) -> bool:
        """Claim what one group has to score; return whether there was anything."""
        needs = self._scoring.outages.needs_down()
        claims = await self._store.claims.claim_sampled(
            split=self._split,
            owner=self._owner,
            lease_seconds=self._scoring.claims.lease_seconds,
            # Claim one at a time in an outage: it probes, and the others of its group would only fail.
            limit=min(self._concurrency - len(self._held), 1 if self._scoring.outages.open else _AT_ONCE),
            without_scorers=needs.scorers,
            only_scorer=self._only_scorer,
        )
        for claim in claims:
            self._scoring.outages.begin_probes(claim.record_id, (), claim.task.scorer)
            self._held.start(claim, self._scoring.score_stored(claim))
        return bool(claims)

    def wake(self) -> None:
        """Look into the queue now, and often for a while."""
        self._woken.set()

    def _ended(self, is_scored: bool) -> None:
        self.wake()
        self.scored += is_scored

    async def _wait(self, stop: asyncio.Event) -> None:
        """Wait until ``wake``, ``stop``, or the next look; looks become rarer while nothing waits."""
        await wait_for_any(stop, self._woken, timeout=self._poll.next())
        if self._woken.is_set():
            self._poll.reset()
        self._woken.clear()


async def score(configs: Configs, split: str, *, until_empty: bool) -> int:
    """Score until a signal, or with ``until_empty`` until nothing waits; return how many got a score."""
    run = configs[RunConfig]
    import_modules(configs[TaskConfig].imported_modules)
    stop = stop_on_signals()
    with retry_outages(run.db_wait_seconds, stop):
        async with await open_existing(run) as store:
            return await score_queued(
                store, configs[SamplingConfig], configs[ClaimConfig], split, stop, until_empty=until_empty
            )


async def score_queued(
    store: Store,
    sampling: SamplingConfig,
    claims: ClaimConfig,
    split: str,
    stop: asyncio.Event,
    *,
    until_empty: bool,
) -> int:
    """Score what waits for a score in ``split``; return how many trajectories got one."""
    allow(await store.imports.paths())
    owner = owner_name()
    outages = Outages(sampling.outage_wait_seconds)
    scoring = Scoring(store=store, outages=outages, sampling=sampling, claims=claims)
    queue = ScoringQueue(scoring, split=split, owner=owner, concurrency=sampling.max_concurrent_scorings)
    try:
        async with background(report_outages(store, lambda: outages.open, owner)):
            await queue.run(stop, until_empty=until_empty)
    finally:
        outages.close()
    return queue.scored
