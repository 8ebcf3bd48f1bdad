"""Score sampled trajectories: at once after sampling, or later from the queue in the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.base.concurrency import background
from agentrl.base.processes import stop_on_signals
from agentrl.base.registry import import_modules
from agentrl.base.spans import NO_SPAN, Span, tracer
from agentrl.base.user_code import allow, contain_call, contain_errors, is_allowed
from agentrl.columns.gold import read_gold, watch_gold
from agentrl.columns.outages import CallFailures, Outages, report_outages
from agentrl.columns.pool import Pool, SlotLeases, owner_name
from agentrl.config.load import Configs
from agentrl.config.schema import ClaimConfig, RunConfig, SamplingConfig, TaskConfig
from agentrl.documents.record import Failure
from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.documents.task import FEEDBACK, Claim
from agentrl.environments.environment import names_of
from agentrl.errors import FailureError, LeaseLostError, ScorerError, StoreError
from agentrl.llm.agent_config import use_prices
from agentrl.observe.logging import failure_text
from agentrl.scoring.answers import answer_seen_in
from agentrl.scoring.scorers import ScorerContext, score_context, stored_context
from agentrl.store.client import open_existing
from agentrl.store.mechanics.retry import retry_outages

if TYPE_CHECKING:
    from agentrl.store.client import Store


logger = logging.getLogger(__name__)


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
        if (tool := answer_seen_in(context, self.sampling.watch_answers)) is not None:
            await self.store.records.advance(claim, RecordStatus.SCORING, answer_seen_in=tool)
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


class QueuedScores(SlotLeases):
    """The filler of scores: claims sampled trajectories that wait for one."""

    def __init__(
        self, scoring: Scoring, *, split: str, owner: str, only_scorer: str | None = None,
        until_empty: bool = False,
    ) -> None:  # fmt: skip
        """Score ``split``, or what ``only_scorer`` scores in it; with ``until_empty``, end with the queue."""
        super().__init__(scoring.store, split, owner)
        self._scoring = scoring
        self._only_scorer = only_scorer
        self._until_empty = until_empty

    async def claim(self, free: int) -> Sequence[Claim]:
        """Claim what one group has to score."""
        outages = self._scoring.outages
        claims = await self.store.claims.claim_sampled(
            split=self.split,
            owner=self.owner,
            lease_seconds=self._scoring.claims.lease_seconds,
            # Claim one at a time in an outage: it probes, and the others of its group would only fail.
            limit=1 if outages.open else free,
            without_scorers=outages.needs_down().scorers,
            only_scorer=self._only_scorer,
        )
        for claim in claims:
            outages.begin_probes(claim.record_id, (), claim.task.scorer)
        return claims

    async def fill(self, claim: Claim) -> bool:
        """Score a trajectory, as ``Scoring.score_stored``."""
        return await self._scoring.score_stored(claim)

    async def is_done(self) -> bool:
        """Return whether the queue is empty and the pool ends with it."""
        return self._until_empty and not await self.store.claims.unscored(self.split, self._only_scorer)


async def score(configs: Configs, split: str, *, until_empty: bool) -> int:
    """Score until a signal, or with ``until_empty`` until nothing waits; return how many got a score."""
    run = configs[RunConfig]
    use_prices(run.prices)
    import_modules(configs[TaskConfig].imported_modules)
    gold = read_gold(configs[SamplingConfig].judge_gold)
    at_once = asyncio.Event()
    stop = stop_on_signals(at_once)
    with retry_outages(run.db_wait_seconds, stop):
        async with await open_existing(run) as store:
            sampling = configs[SamplingConfig]
            async with background(watch_gold(store, gold, sampling, owner_name())):
                return await score_queued(
                    store, sampling, configs[ClaimConfig], split, stop, until_empty=until_empty,
                    at_once=at_once,
                )  # fmt: skip


async def score_queued(
    store: Store,
    sampling: SamplingConfig,
    claims: ClaimConfig,
    split: str,
    stop: asyncio.Event,
    *,
    until_empty: bool,
    at_once: asyncio.Event | None = None,
) -> int:
    """Score what waits for a score in ``split``; return how many trajectories got one."""
    allow(await store.imports.paths())
    owner = owner_name()
    outages = Outages(sampling.outage_wait_seconds)
    scoring = Scoring(store=store, outages=outages, sampling=sampling, claims=claims)
    scores = QueuedScores(scoring, split=split, owner=owner, until_empty=until_empty)
    pool = Pool(store, scores, claims, sampling.max_concurrent_scorings)
    outages.changed = pool.wake
    try:
        await pool.run(stop, report_outages(store, lambda: outages.open, owner), at_once=at_once)
    finally:
        outages.close()
    return pool.filled
