"""Evaluate policies: one, or the versions of a run as it trains; sample tasks, store the results."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.concurrency import background
from agentrl.base.processes import STOPPED, stop_on_signals
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    EvaluationConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
)
from agentrl.documents.run import Evaluation, PolicyVersion
from agentrl.documents.status import EvaluationStatus
from agentrl.documents.task import Task
from agentrl.documents.task_file import ReadResult
from agentrl.errors import ENGINES, EngineError, ModelError, TaskFileError
from agentrl.evaluation.policy import (
    EvaluatedPolicy,
    FixedVersionRouter,
    PolicyEngines,
    find_model,
    find_version,
    of_published,
    require_model,
    shared_versions,
    wait_for_shared,
)
from agentrl.evaluation.report import evaluated_tasks, render, results_of
from agentrl.inference.engines.commands import require_engine
from agentrl.observe.logging import describe_process_id
from agentrl.observe.progress import Parts, StoppedError
from agentrl.observe.terminal import print_json
from agentrl.rollout.housekeeping import GroupFinalizer, collect_garbage_less_often
from agentrl.rollout.load_tasks import load_read_tasks, read_source
from agentrl.rollout.preflight import probe, require_judge
from agentrl.rollout.sampler import Sampler
from agentrl.rollout.setup import (
    allow_configured_imports,
    open_format,
    open_worker,
    require_extensions,
    sampler_config,
)
from agentrl.scoring.evaluation import Prices
from agentrl.store.client import Store, open_existing, open_store, run_exists
from agentrl.store.evaluations import content_digest, digest
from agentrl.store.mechanics.retry import log_store_errors, retry_outages
from agentrl.weights.folder import require_folder

if TYPE_CHECKING:
    import logging

    from agentrl.rollout.worker import Worker
    from agentrl.store.client import Store

_ID_LENGTH = 8
_UNREAD_SPLIT = "eval"
_MODEL_SETTINGS = ("chat_template", "chat_format", "chat_template_kwargs", "thinking_retention", "dtype")


async def identify(
    store: Store, configs: Configs, policy: EvaluatedPolicy, read: ReadResult | None = None
) -> Evaluation:
    """Return the evaluation of ``policy`` by the flags; it need not be stored. Raises TaskFileError.

    ``read`` is the task file, if it has been read already.
    """
    tasks, flags = configs[TaskConfig], configs[EvaluationConfig]
    read = read or await read_file(configs, _UNREAD_SPLIT)
    tasks_digest = await asyncio.to_thread(digest_tasks, read.tasks)
    settings = sampling_settings(configs)
    settings_digest = digest(settings)
    both = hashlib.sha256(f"{tasks_digest} {settings_digest}".encode()).hexdigest()[:_ID_LENGTH]
    rules = await evaluation_rules(store, configs)
    return Evaluation(
        id="-".join(filter(None, ("eval", policy.name, both, flags.eval_label))),
        version=policy.version,
        step=policy.step,
        model=policy.folder,
        model_digest=policy.digest,
        file=str(tasks.eval_file),
        tasks_digest=tasks_digest,
        settings_digest=settings_digest,
        settings=settings,
        samples=tasks.num_generations,
        label=flags.eval_label,
        right_threshold=rules.right_threshold,
    )


async def read_file(configs: Configs, split: str) -> ReadResult:
    """Read ``--eval_file`` for ``split``. Raises TaskFileError, also if it holds no tasks."""
    tasks = configs[TaskConfig]
    return await read_source(str(tasks.eval_file), tasks, split=split, seed=configs[RunConfig].seed)


async def read_unchanged(configs: Configs, evaluation: Evaluation) -> ReadResult:
    """Read the tasks of ``evaluation`` again, for its split. Raises TaskFileError if they have changed."""
    read = await read_file(configs, evaluation.id)
    if await asyncio.to_thread(digest_tasks, read.tasks) != evaluation.tasks_digest:
        raise TaskFileError(
            f"the task file {evaluation.file} changed while it was read",
            hint="start the evaluation when no process writes to it",
        )
    return read


def digest_tasks(tasks: Sequence[Task]) -> str:
    """Return a hash of the content of tasks; their order does not matter."""
    return digest(sorted((task.task_id, content_digest(task)) for task in tasks))


def sampling_settings(configs: Configs) -> dict[str, Any]:
    """Return the flags that change what is sampled."""
    model, sampling = configs[ModelConfig], configs[SamplingConfig]
    return {
        "num_generations": configs[TaskConfig].num_generations,
        "seed": configs[RunConfig].seed,
        "max_new_tokens": sampling.max_new_tokens,
        "preferred_sampling_params": sampling.preferred_sampling_params,
        **dataclasses.asdict(configs[AgentConfig]),
        **{name: getattr(model, name) for name in _MODEL_SETTINGS},
    }


async def evaluation_rules(store: Store, configs: Configs) -> GroupConfig:
    """Return the group flags, with the run's ``right_threshold`` where none is given."""
    rules = configs[GroupConfig]
    groups = (await store.settings.all()).get("groups")
    threshold = None if groups is None else groups.values.get("right_threshold")
    if threshold is None or "right_threshold" in configs.given:
        return rules
    return replace(rules, right_threshold=float(threshold))


_LOOK_SECONDS = 1.0
_COUNT_SECONDS = 3.0


class EvaluationRun:
    """Samples the tasks of one evaluation after another, on the engines of ``PolicyEngines``."""

    def __init__(
        self,
        store: Store,
        configs: Configs,
        engines: PolicyEngines,
        progress: Parts,
        logger: logging.Logger,
    ) -> None:
        self._store = store
        self._configs = configs
        self._engines = engines
        self._progress = progress
        self._logger = logger
        self.waiting: Sequence[str] = ()
        """Evaluations that will come later; they keep their weights from being deleted."""

    async def evaluate(self, evaluation: Evaluation, policy: EvaluatedPolicy) -> Evaluation:
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

    async def _sample(self, evaluation: Evaluation, policy: EvaluatedPolicy) -> None:
        flags = self._configs[EvaluationConfig]
        where = "an engine of its own" if flags.eval_engine == "own" else "an engine"
        await self._progress.until(f"waiting for {where} with {policy}", self._engines.serve(policy))
        await self._progress.until("sampling", self._run_sampler(evaluation, policy))

    async def _run_sampler(self, evaluation: Evaluation, policy: EvaluatedPolicy) -> None:
        configs, split = configs_of(self._configs, policy), evaluation.id
        config = sampler_config(configs, split, epochs=1)
        config = dataclasses.replace(config, claims=dataclasses.replace(config.claims, drain_seconds=0.0))
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


def configs_of(configs: Configs, policy: EvaluatedPolicy) -> Configs:
    """Return the configuration with the model folder of ``policy``, if it is on this machine.

    Engines are called directly, since a router in front of them may choose one with another version.
    """
    folder = {} if policy.folder is None else {"model_name_or_path": policy.folder}
    return configs.with_flags({"router_url": None, **folder})


async def _no_limit() -> None:
    """Set no limit: an evaluation may begin any number of groups, and takes no part in admission."""
    return


logger = logging.getLogger(__name__)


async def evaluate(configs: Configs, *, as_json: bool = False) -> int:
    """Evaluate and print the results. Returns 0, or 130 if a signal stopped it."""
    stop = stop_on_signals()
    run = configs[RunConfig]
    progress = Parts(f"eval {run.run_name}", stop)
    require_extensions(configs)
    async with progress.lines():
        try:
            with retry_outages(run.db_wait_seconds, stop):
                await _evaluate(configs, progress, as_json)
        except StoppedError as stopped:
            progress.say(f"stopped while {stopped}")
            progress.say("claims are released; the same command goes on")
            return STOPPED
    return 0


async def _evaluate(configs: Configs, progress: Parts, as_json: bool) -> None:
    # Check before the run is made: a start that is refused makes none.
    read = await progress.until("reading the tasks", read_file(configs, _UNREAD_SPLIT))
    flags, base = configs[EvaluationConfig], configs[ModelConfig].model_name_or_path
    require_folder(configs[ModelConfig])
    if flags.eval_model is not None:
        require_model(Path(flags.eval_model))
    if base is not None and flags.eval_model is None:
        await open_format(None, configs)
    if flags.eval_engine == "own":
        require_engine(configs[EngineConfig].engine)
    if not await progress.until("connecting to the database", run_exists(configs[RunConfig])):
        require_judge(read.names["scorer"], configs[SamplingConfig].agent_config_path)
    brings_policy = flags.eval_model is not None or (base is not None and not flags.eval_version)
    opening = open_store if brings_policy or flags.eval_engine == "shared" else open_existing
    store = await progress.until("connecting to the database", opening(configs[RunConfig]))
    async with store:
        engines = PolicyEngines(store, configs)
        try:
            runner = EvaluationRun(store, configs, engines, progress, logger)
            if configs[EvaluationConfig].eval_steps is not None:
                await follow(store, configs, runner, progress, lambda item: _print(item, as_json))
                return
            policy = await choose_policy(store, configs, progress)
            evaluation = await identify(store, configs, policy, read)
            progress.say(f"evaluating {policy} as {evaluation.id}")
            _print(await runner.evaluate(evaluation, policy), as_json)
        finally:
            await engines.close()


def _print(evaluation: Evaluation, as_json: bool) -> None:
    if as_json:
        print_json(evaluation.to_document())
    else:
        print(render(evaluation), flush=True)


async def choose_policy(store: Store, configs: Configs, progress: Parts) -> EvaluatedPolicy:
    """Return the policy that the flags name. Raises ModelError, and EngineError in a wait for an engine."""
    flags, base = configs[EvaluationConfig], configs[ModelConfig].model_name_or_path
    if flags.eval_model is not None:
        return await progress.until(f"reading {flags.eval_model}", find_model(store, flags.eval_model, base))
    version = flags.eval_version
    if flags.eval_engine == "shared":
        what = "any version" if version is None else f"version {version}"
        version = await progress.until(
            f"waiting for an engine with {what}",
            wait_for_shared(store, configs, version, tell=progress.tell),
        )
    elif version is None and flags.eval_engine == "auto":
        version = max(await shared_versions(store, configs), default=None)
    if version is None:
        newest = await store.policy_versions.latest()
        version = 0 if newest is None else newest.id
        if newest is None and base is None:
            raise ModelError(
                f"run {store.run_name!r} has published no policy version, and no engine serves one",
                hint="give --eval_model FOLDER, or --model_name_or_path FOLDER for the model it starts from",
            )
    is_served = version in await shared_versions(store, configs)
    if is_served and await store.policy_versions.get(version) is None:
        return EvaluatedPolicy(version=version, step=0 if version == 0 else None, folder=base)
    return await find_version(store, version, base)


_POLL_SECONDS = 2.0
_PAGE = 100


async def follow(
    store: Store,
    configs: Configs,
    runner: EvaluationRun,
    progress: Parts,
    done: Callable[[Evaluation], None],
) -> None:
    """Evaluate every due version, oldest first, until ``--idle_exit_seconds`` pass without one.

    A version that waits for its turn is stored as ``waiting``, so that its weights are not deleted. Raises
    StoppedError at a stop signal. ``done`` receives each finished evaluation.
    """
    every = configs[EvaluationConfig].eval_steps or 1
    limit = configs[SamplingConfig].idle_exit_seconds
    busy_at = time.monotonic()
    waiting: dict[str, tuple[Evaluation, EvaluatedPolicy]] = {}
    seen: set[int] = set()
    try:
        while True:
            due = await progress.until(
                f"waiting for a version whose step is a multiple of {every}",
                _due(store, configs, every, seen, wait=not waiting),
            )
            for evaluation, policy in due:
                waiting[evaluation.id] = evaluation, policy
                await store.evaluations.begin(
                    dataclasses.replace(evaluation, status=EvaluationStatus.WAITING)
                )
            if not waiting:
                if limit is not None and time.monotonic() - busy_at >= limit:
                    progress.say(f"no version to evaluate for {limit:g} s (--idle_exit_seconds)")
                    return
                continue
            evaluation, policy = waiting.pop(next(iter(waiting)))
            runner.waiting = tuple(waiting)
            progress.say(f"evaluating {policy} as {evaluation.id}")
            done(await runner.evaluate(evaluation, policy))
            busy_at = time.monotonic()
    finally:
        await store.evaluations.stop_waiting(list(waiting))


async def _due(
    store: Store, configs: Configs, every: int, seen: set[int], *, wait: bool
) -> list[tuple[Evaluation, EvaluatedPolicy]]:
    """Return new due versions without results, oldest first; add every version that was read to ``seen``.

    With ``wait``, waits a moment for a change if there is none.
    """
    versions = [item for item in await _published(store, seen) if item.step % every == 0]
    if not versions:
        if wait:
            await store.wait_for_change("PolicyVersion", timeout=_POLL_SECONDS)
        return []
    read = await read_file(configs, "eval")
    due = []
    for version in sorted(versions, key=lambda item: item.id):
        policy = of_published(version)
        if not policy.is_stored:
            continue
        evaluation = await identify(store, configs, policy, read)
        stored = await store.evaluations.get(evaluation.id)
        if stored is None or stored.results is None:
            due.append((evaluation, policy))
    return due


async def _published(store: Store, seen: set[int]) -> Sequence[PolicyVersion]:
    """Return the published versions that are not in ``seen``, newest first."""
    versions: list[PolicyVersion] = []
    below: int | None = None
    while page := await store.policy_versions.published(_PAGE, below=below):
        new = [item for item in page if item.id not in seen]
        versions += new
        if len(new) < len(page):
            break
        below = page[-1].id
    seen.update(item.id for item in versions)
    return versions
