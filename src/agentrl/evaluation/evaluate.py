"""Evaluate one policy: load its tasks, sample them, and store the results."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.concurrency import background
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AgentConfig,
    EvaluationConfig,
    RunConfig,
    SamplingConfig,
)
from agentrl.documents.run import Evaluation
from agentrl.documents.status import EvaluationStatus
from agentrl.errors import ENGINES, EngineError
from agentrl.evaluation.engines import FixedVersionRouter, PolicyEngines
from agentrl.evaluation.identity import evaluation_rules, read_unchanged
from agentrl.evaluation.policy import Policy
from agentrl.evaluation.progress import Progress
from agentrl.evaluation.report import evaluated_tasks, results_of
from agentrl.observe.logging import describe_process_id
from agentrl.rollout.finalizer import GroupFinalizer
from agentrl.rollout.housekeeping import collect_garbage_less_often
from agentrl.rollout.load_tasks import load_read_tasks
from agentrl.rollout.preflight import probe
from agentrl.rollout.sampler import Sampler
from agentrl.rollout.setup import allow_configured_imports, open_worker, sampler_config
from agentrl.scoring.evaluation import Prices
from agentrl.store.mechanics.retry import log_store_errors

if TYPE_CHECKING:
    import logging

    from agentrl.rollout.worker import Worker
    from agentrl.store.client import Store


_LOOK_SECONDS = 1.0
_COUNT_SECONDS = 3.0


class EvaluationRun:
    """Samples the tasks of one evaluation after another, on the engines of ``PolicyEngines``."""

    def __init__(
        self,
        store: Store,
        configs: Configs,
        engines: PolicyEngines,
        progress: Progress,
        logger: logging.Logger,
    ) -> None:
        self._store = store
        self._configs = configs
        self._engines = engines
        self._progress = progress
        self._logger = logger
        self.waiting: Sequence[str] = ()
        """Evaluations that will come later; they keep their weights from being deleted."""

    async def evaluate(self, evaluation: Evaluation, policy: Policy) -> Evaluation:
        """Sample what is missing and store the results; return the stored evaluation.

        Trajectories that the same evaluation has scored before are not sampled again. Raises StoppedError at
        a stop signal: claims are then released, and the evaluation is ``stopped``.
        """
        running = dataclasses.replace(evaluation, status=EvaluationStatus.RUNNING, by=describe_process_id())
        await self._store.evaluations.begin(running)
        results = None
        try:
            await self._progress.until("reading the tasks", self._load(evaluation))
            counts = await self._store.evaluations.counts(evaluation.id)
            if counts.left or await self._store.tasks.unfinished(evaluation.id):
                await self._sample(evaluation, policy)
            tasks = await evaluated_tasks(self._store, self._configs, evaluation)
            flags = self._configs[EvaluationConfig]
            prices = Prices(input=flags.eval_input_price, output=flags.eval_output_price)
            results = await asyncio.to_thread(results_of, tasks, prices)
        finally:
            with log_store_errors(self._logger, "the end of the evaluation is not stored", outages=True):
                await self._store.evaluations.end(evaluation.id, results)
        stored = await self._store.evaluations.get(evaluation.id)
        return stored or evaluation

    async def _load(self, evaluation: Evaluation) -> None:
        await load_read_tasks(self._store, evaluation.file, await read_unchanged(self._configs, evaluation))

    async def _sample(self, evaluation: Evaluation, policy: Policy) -> None:
        flags = self._configs[EvaluationConfig]
        where = "an engine of its own" if flags.eval_engine == "own" else "an engine"
        await self._progress.until(f"waiting for {where} with {policy}", self._engines.serve(policy))
        await self._progress.until("sampling", self._run_sampler(evaluation, policy))

    async def _run_sampler(self, evaluation: Evaluation, policy: Policy) -> None:
        configs, split = configs_of(self._configs, policy), evaluation.id
        config = dataclasses.replace(sampler_config(configs, split, epochs=1), grace_seconds=0.0)
        rules = await evaluation_rules(self._store, configs)
        finalizer = GroupFinalizer(self._store, rules, split=split, seed=configs[RunConfig].seed)
        ending = asyncio.Event()
        await allow_configured_imports(self._store, configs)
        opened = open_worker(
            self._store, configs, live=self._engines.live, stop=ending,
            wrap=lambda router: FixedVersionRouter(router, policy.token_version),
        )  # fmt: skip
        async with opened as (worker, _):
            collect_garbage_less_often()
            await probe(
                self._store, worker.tools, configs[SamplingConfig], split, agent=configs[AgentConfig],
                chat_format=worker.chat_format,
            )  # fmt: skip
            sampler = Sampler(self._store, worker, finalizer, config, _no_limit)
            sampling = asyncio.create_task(sampler.run(ending))
            try:
                async with background(self._watch(worker, split)):
                    await asyncio.shield(sampling)
            finally:
                ending.set()  # a sampler that is cancelled could lose a claim that is being granted
                await asyncio.wait([sampling])

    async def _watch(self, worker: Worker, split: str) -> None:
        """Report the progress. Raises EngineError if the engine ends or all are down for too long."""
        limit = self._configs[SamplingConfig].engine_wait_seconds
        counted_at = 0.0
        while True:
            if (ended := self._engines.own_has_ended) is not None:
                raise EngineError(ended, hint="the same command goes on where this one stopped")
            down = {breaker.dependency: breaker for breaker in worker.outages.open}
            engines = down.get(ENGINES)
            if engines is not None and time.monotonic() - (engines.down_since or 0.0) > limit:
                raise EngineError(
                    f"no engine has answered for {limit:g} s (--engine_wait_seconds): {engines.why}",
                    hint="start it again, or give --eval_engine own; the same command then goes on",
                )
            if time.monotonic() - counted_at >= _COUNT_SECONDS:
                counted_at = time.monotonic()
                with log_store_errors(self._logger, "the progress cannot be read", outages=True):
                    await self._report(split, [str(item) for item in down])
            await asyncio.sleep(_LOOK_SECONDS)

    async def _report(self, split: str, down: Sequence[str]) -> None:
        await self._store.evaluations.beat([split, *self.waiting])
        counts = await self._store.evaluations.counts(split)
        failed = f", {counts.failed} failed" if counts.failed else ""
        waits = f"; waiting for {', '.join(down)}" if down else ""
        self._progress.tell(
            f"{counts.scored} of {counts.total} scored{failed}, {counts.running} running{waits}"
        )


def configs_of(configs: Configs, policy: Policy) -> Configs:
    """Return the configuration with the model folder of ``policy``, if it is on this machine.

    Engines are called directly, since a router in front of them may choose one with another version.
    """
    folder = {} if policy.folder is None else {"model_name_or_path": policy.folder}
    return configs.with_flags({"router_url": None, **folder})


async def _no_limit() -> None:
    """Set no limit: an evaluation may begin any number of groups, and takes no part in admission."""
    return
