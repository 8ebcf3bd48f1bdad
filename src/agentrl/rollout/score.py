"""Run one scorer process: score the sampled trajectories that wait for a score."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agentrl.config.load import Configs
from agentrl.config.schema import ClaimConfig, RunConfig, SamplingConfig
from agentrl.registry import allow_imports
from agentrl.rollout.outage_reports import report_outages
from agentrl.rollout.outages import Outages
from agentrl.rollout.scoring import Scoring, ScoringQueue
from agentrl.rollout.setup import owner_name, stop_on_signals
from agentrl.store.client import open_existing
from agentrl.store.mechanics.retry import retry_outages

if TYPE_CHECKING:
    from agentrl.store.client import Store


async def score(configs: Configs, split: str, *, until_empty: bool) -> int:
    """Score until a signal, or with ``until_empty`` until nothing waits; return how many got a score."""
    run = configs[RunConfig]
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
    allow_imports(await store.imports.paths())
    owner = owner_name()
    outages = Outages(sampling.outage_wait_seconds)
    scoring = Scoring(store=store, outages=outages, sampling=sampling, claims=claims)
    queue = ScoringQueue(scoring, split=split, owner=owner, concurrency=sampling.max_concurrent_scorings)
    reports = asyncio.create_task(report_outages(store, outages, owner))
    try:
        await queue.run(stop, until_empty=until_empty)
    finally:
        reports.cancel()
        await asyncio.gather(reports, return_exceptions=True)
        outages.close()
    return queue.scored
