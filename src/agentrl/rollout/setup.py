"""Run a sampler process: assemble worker and sampler from flags, load tasks, claim until all is done."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.base.concurrency import background, wait_for_any
from agentrl.base.processes import stop_on_signals
from agentrl.base.registry import import_modules
from agentrl.base.user_code import allow, names_outside
from agentrl.calls.prompts import CONTEXT_LIMITS, context_problem
from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.model_folder import context_length, tokenizer_fingerprint
from agentrl.chat.open_format import open_chat_format
from agentrl.chat.parsers.arguments import load_validator
from agentrl.chat.parsers.parser import PARSERS
from agentrl.columns.gold import GoldSlice, read_gold, watch_gold
from agentrl.columns.outages import Outages
from agentrl.columns.pool import bounded, owner_name
from agentrl.config.agreement import sampler_settings
from agentrl.config.flags import require
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    ContainerConfig,
    EngineConfig,
    GatewayConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    ToolConfig,
    TrainConfig,
)
from agentrl.data.finalize_group import TRAIN_SPLIT
from agentrl.documents.run import Doing, InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.environments.environment import use_containers
from agentrl.environments.snapshots import Snapshots
from agentrl.errors import ConfigError, CostLimitError, ModelError
from agentrl.inference.engine import Router
from agentrl.inference.session import EngineRouter, LiveEngines
from agentrl.llm.agent_config import Prices, load_browse, read_prices, use_prices
from agentrl.observe.begin_run import begin_model, begin_run
from agentrl.rollout.agent_io import Endpoint, agent_cfg_path, read_agent_cfg
from agentrl.rollout.agents import CONTEXT_MANAGERS, check_agent
from agentrl.rollout.housekeeping import EpochPlan, GroupFinalizer, collect_garbage_less_often
from agentrl.rollout.load_tasks import load_read_tasks, read_source
from agentrl.rollout.preflight import probe, require_groups, require_judge
from agentrl.rollout.sampler import Sampler, SamplerConfig
from agentrl.rollout.target_concurrency import WINDOW_SECONDS, TargetConcurrency
from agentrl.rollout.worker import Worker
from agentrl.scoring.groups import ESTIMATORS
from agentrl.store.claims import GroupLimit
from agentrl.store.client import Store, open_store, run_exists
from agentrl.store.costs import Costs
from agentrl.store.epochs import CURRICULUM, ORDER, Selection
from agentrl.store.mechanics.retry import log_store_errors, retry_outages
from agentrl.store.services import SAMPLER_BEAT_SECONDS
from agentrl.tools.browse import open_browse_agent
from agentrl.tools.pool import ToolPool
from agentrl.weights.folder import replayed_experts, require_folder
from agentrl.weights.local_copy import model_files, weights_dir

if TYPE_CHECKING:
    from agentrl.gateway.app import GatewayHost
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

_NEWEST = 32
"""Versions of which the newest stored one is searched."""


async def model_folder(store: Store | None, configs: Configs) -> str:
    """Return ``--model_name_or_path``, or a folder with the configuration of the newest published weights.

    Raises PublishError if these cannot be read.
    """
    folder = configs[ModelConfig].model_name_or_path
    if folder is None and store is not None:
        newest = await store.policy_versions.published(_NEWEST)
        version = next((each for each in newest if each.is_stored), None)
        if version is not None:
            root = await weights_dir(store, configs[EngineConfig].weights_dir)
            folder = await model_files(store, version, root)
    if folder is None:
        raise ModelError(
            "no model is named, and the run has published none", hint="give --model_name_or_path FOLDER"
        )
    return folder


def open_router(
    live: LiveEngines,
    configs: Configs,
    chat_format: ChatFormat,
    folder: str,
    outages: Outages | None = None,
    *,
    trains: bool = False,
) -> EngineRouter:
    """Return the router over the engines of ``live``, for the model in ``folder``.

    ``trains`` says that its calls are trained. Prompt and output of a call are trained in one piece, so a
    micro-batch of ``--max_tokens`` bounds their context too.
    """
    sampling = configs[SamplingConfig]
    lengths = [context_length(configs[ModelConfig], folder)]
    if trains:
        lengths.append(configs[TrainConfig].max_tokens)
    return EngineRouter(
        live,
        token_timeout=sampling.engine_timeout_seconds,
        wait_seconds=sampling.engine_wait_seconds,
        tokens=chat_format,
        tokenizer=tokenizer_fingerprint(folder),
        max_model_len=min(filter(None, lengths), default=None),
        router_url=configs[EngineConfig].router_url,
        outages=outages,
        experts=replayed_experts(configs[ModelConfig], folder),
    )


async def open_format(store: Store | None, configs: Configs) -> ChatFormat:
    """Open the chat format of ``--model_name_or_path``, or of the newest published weights."""
    model = configs[ModelConfig]
    folder = await model_folder(store, configs)
    parser = configs[AgentConfig].tool_call_parser
    with_tools = configs[ToolConfig].any_named
    return await asyncio.to_thread(open_chat_format, folder, model, parser, with_tools=with_tools)


def sampling_params(sampling: SamplingConfig, chat_format: ChatFormat) -> SamplingParams:
    """Return ``--preferred_sampling_params`` with the token limit and the model's stop tokens."""
    params = SamplingParams.from_json(sampling.preferred_sampling_params)
    stops = params.stop_token_ids or tuple(sorted(chat_format.stop_ids))
    return params.replace(max_new_tokens=sampling.max_new_tokens, stop_token_ids=stops)


async def live_engines(
    store: Store, engine: EngineConfig, version: int | None = None
) -> Sequence[InferenceService]:
    """Return the engines with a recent heartbeat; with ``version``, only those that serve it."""
    services = await store.services.live(engine.alive_seconds)
    return [item for item in services if version is None or item.policy_version == version]


def require_extensions(configs: Configs) -> None:
    """Raise ConfigError for an extension or a file that the flags name and that cannot be found or read.

    Call it before the run stores its flags, and before tasks are read: it says what runs their containers.
    """
    use_containers(configs[ContainerConfig])
    import_modules(configs[TaskConfig].imported_modules)
    agent = configs[AgentConfig]
    path = agent_cfg_path(None, agent.agent_cfg_path)
    check_agent(agent.agent_name, path)
    read_agent_cfg(path)
    CONTEXT_MANAGERS.get(agent.new_context)
    if agent.tool_call_parser is not None:
        PARSERS.get(agent.tool_call_parser)
    ToolPool(configs[ToolConfig])  # reads what configures tools, and connects to nothing
    load_browse(configs[SamplingConfig].agent_config_path, is_required="agent_config_path" in configs.given)
    read_prices(configs[RunConfig].prices)
    ESTIMATORS.get(configs[GroupConfig].advantage)


def read_limits(configs: Configs) -> tuple[GoldSlice | None, Prices | None]:
    """Return the files of --judge_gold and --prices. Raises ConfigError, also for a limit without prices."""
    sampling, prices = configs[SamplingConfig], read_prices(configs[RunConfig].prices)
    if sampling.max_cost is not None and prices is None:
        raise ConfigError(
            f"--max_cost is {sampling.max_cost:g}, and nothing has a price",
            hint="give --prices FILE: docs/operations.md#what-a-run-costs",
        )
    return read_gold(sampling.judge_gold), prices


async def allow_configured_imports(store: Store, configs: Configs) -> None:
    """Restrict imports to the modules that this process's flags and the run's Imports document name."""
    agent, groups = configs[AgentConfig], configs[GroupConfig]
    own = {agent.agent_name, agent.new_context, groups.advantage}
    own.update(name.strip() for name in configs[ToolConfig].tools.split(","))
    own.update(name for name in (agent.tool_call_parser, groups.group_filter) if name is not None)
    allow(configs[TaskConfig].allowed_names | own)
    allow(await store.imports.paths())


def sampler_config(configs: Configs, split: str, *, epochs: int) -> SamplerConfig:
    """Return the settings of a sampler of ``split``, under a new owner name."""
    tasks, sampling = configs[TaskConfig], configs[SamplingConfig]
    return SamplerConfig(
        split=split,
        owner=owner_name(),
        concurrency=sampling.max_concurrent_samples_per_process
        * (1 if sampling.target_concurrency == "auto" else sampling.target_concurrency),
        scorings=sampling.max_concurrent_scorings,
        claims=configs[ClaimConfig],
        plan=EpochPlan(
            epochs=epochs,
            seed=configs[RunConfig].seed,
            num_generations=tasks.num_generations,
            shuffle=tasks.shuffle_tasks,
        ),
    )


@dataclass(kw_only=True)
class SamplerGateway:
    """The gateway of a sampler, imported and started when an agent first opens it: it needs web libraries."""

    store: Store
    configs: Configs
    router: Router
    chat_format: ChatFormat
    params: SamplingParams
    host: GatewayHost | None = None

    @asynccontextmanager
    async def open(
        self, claim: Claim, *, train: str, max_calls: int, takes_reward: bool = True,
        volatile: Sequence[str] = (),
    ) -> AsyncIterator[Endpoint]:  # fmt: skip
        """Return the endpoint of a trajectory."""
        if self.host is None:
            from agentrl.gateway.answerer import Answerer
            from agentrl.gateway.app import GatewayHost

            answerer = Answerer(
                store=self.store,
                router=self.router,
                chat_format=self.chat_format,
                params=self.params,
                agent=self.configs[AgentConfig],
                seed=self.configs[RunConfig].seed,
            )
            self.host = GatewayHost(answerer, self.configs[GatewayConfig])
        async with self.host.open(
            claim, train=train, max_calls=max_calls, takes_reward=takes_reward, volatile=volatile
        ) as endpoint:
            yield endpoint

    async def close(self) -> None:
        """Stop the gateway."""
        if self.host is not None:
            await self.host.close()


@asynccontextmanager
async def open_worker(
    store: Store,
    configs: Configs,
    *,
    live: LiveEngines | None = None,
    wrap: Callable[[Router], Router] = lambda router: router,
    stop: asyncio.Event | None = None,
    kind: type[Worker] = Worker,
    trains: bool = False,
    chat_format: ChatFormat | None = None,
) -> AsyncIterator[tuple[Worker, EngineRouter]]:
    """Open a worker with its dependencies; ``live`` lists its engines, by default all live ones of the run.

    Its agents and its gateway get their engines from what ``wrap`` returns for the router over these. Tool
    servers that are down are left to ``LateServers``. ``stop`` is the event that signals to this process set.
    ``trains`` is that of ``open_router``, ``chat_format`` what ``open_format`` returned. Raises
    ToolServerConfigError for a server that cannot be used as it is configured.
    """
    agent, sampling = configs[AgentConfig], configs[SamplingConfig]
    use_prices(configs[RunConfig].prices)
    chat_format = chat_format or await open_format(store, configs)
    folder = await model_folder(store, configs)
    params = sampling_params(sampling, chat_format)
    outages = Outages(sampling.outage_wait_seconds)
    live = live or (lambda: live_engines(store, configs[EngineConfig]))
    router = open_router(live, configs, chat_format, folder, outages, trains=trains)
    engines = wrap(router)
    tools = ToolPool(configs[ToolConfig], open_browse_agent(sampling.agent_config_path))
    gateway = SamplerGateway(
        store=store, configs=configs, router=engines, chat_format=chat_format, params=params
    )
    run, containers = configs[RunConfig], configs[ContainerConfig]
    place = containers.snapshots_to and f"{containers.snapshots_to.rstrip('/')}/{run.run_name}"
    snapshots = Snapshots(
        place or f"{run.output}/snapshots", store.settings.owner, containers.snapshot_mb << 20
    )
    async with AsyncExitStack() as stack:
        # Push in this order so that the gateway closes first: its requests use the tools and the engines.
        stack.push_async_callback(router.close)
        stack.callback(outages.close)
        stack.push_async_callback(tools.close)
        stack.push_async_callback(gateway.close)
        await router.engines.refresh()
        if (problem := context_problem(agent, sampling, router.engines.context_length)) is not None:
            # The context itself limits a run whose user has named no limit.
            logger.log(logging.WARNING if CONTEXT_LIMITS & configs.given else logging.INFO, "%s", problem)
        await tools.open_reachable()
        load_validator()
        worker = kind(
            store=store, router=engines, tools=tools, chat_format=chat_format, params=params,
            seed=configs[RunConfig].seed, agent=agent, sampling=sampling, claims=configs[ClaimConfig],
            stop=stop or asyncio.Event(), outages=outages, gateway=gateway,
            environment_timeout=configs[ToolConfig].tool_timeout_seconds, snapshots=snapshots,
        )  # fmt: skip
        yield worker, router


@dataclass(frozen=True, slots=True)
class AdmissionLimit:
    """Limit the groups that are being sampled or wait to be trained.

    Groups are trained in the order in which they began. With at most (``max_staleness`` + 1) ×
    ``groups_per_step`` groups open, including the step in progress, a group that begins with the newest
    weights is trained at most ``max_staleness`` steps later, if it is ready by then. Steps do not wait for a
    slower group; ``staleness_policy`` decides about its old tokens. Unpublished weights, and engines that
    serve older ones, reduce this limit by the number of optimizer steps that they lag. ``oversample_groups``
    more may be open, so that fewer steps wait.
    """

    sampling: SamplingConfig
    training: TrainConfig

    @property
    def max_staleness(self) -> int:
        """Return how many optimizer steps sampling may run ahead: 0 with ``--sync_sampling``."""
        return 0 if self.sampling.sync_sampling else self.sampling.max_staleness

    @property
    def most_groups(self) -> int:
        """Return how many groups may be open at most."""
        return (self.max_staleness + 1) * self.training.groups_per_step + self.sampling.oversample_groups

    async def groups_allowed(self, store: Store, engine_versions: Collection[int]) -> GroupLimit:
        """Return how many groups may be open after the last step. Groups that have begun may always finish.

        ``engine_versions`` are the versions that engines serve; with none, the newest counts. The version of
        the earliest step decides: after a resume, that need not be the lowest number.
        """
        newest = await store.policy_versions.latest()
        step = await store.steps.last()
        trained = 0 if step is None else step.step
        published = 0 if newest is None else newest.step
        served = published
        for version in engine_versions:
            if newest is not None and version < newest.id:
                serving = await store.policy_versions.get(version)
                served = min(served, 0 if serving is None else serving.step)
        lag = max(trained, published) - served
        groups = max(0, self.max_staleness + 1 - lag) * self.training.groups_per_step
        if groups:
            # Add none where none may begin: synchronous sampling would start on the old weights.
            groups += self.sampling.oversample_groups
        return GroupLimit(groups, after_step=trained, engines_lag=served < published)


async def sample(configs: Configs) -> None:
    """Run a sampler until every epoch is finalized, its work runs out, or a signal stops it."""
    run, tasks, sampling, groups = (
        configs[RunConfig], configs[TaskConfig], configs[SamplingConfig], configs[GroupConfig],
    )  # fmt: skip
    admission = AdmissionLimit(sampling, configs[TrainConfig])
    config = replace(
        sampler_config(configs, TRAIN_SPLIT, epochs=tasks.num_train_epochs),
        selection=None
        if tasks.task_selection == ORDER
        else Selection(tasks.num_train_epochs, by_level=tasks.task_selection == CURRICULUM),
        idle_exit_seconds=sampling.idle_exit_seconds,
        cut_after=admission.max_staleness + 1 if sampling.tail_policy == "cut" else None,
    )
    at_once = asyncio.Event()
    stop = stop_on_signals(at_once)
    with retry_outages(run.db_wait_seconds, stop):
        require_extensions(configs)
        require_folder(configs[ModelConfig])
        gold, prices = read_limits(configs)
        read = None
        if tasks.train_file is not None:
            require_groups(groups, tasks.num_generations)
            read = await read_source(tasks.train_file, tasks, split=TRAIN_SPLIT, seed=run.seed)
            _require_order(tasks.task_selection, bool(read.mixture))
        # Open it here, if the flags name the model: a start that is refused makes no run.
        is_named = configs[ModelConfig].model_name_or_path is not None
        chat_format = await open_format(None, configs) if is_named else None
        if read is not None and not await run_exists(run):
            require_judge(read.names["scorer"], sampling.agent_config_path)
        async with await open_store(run) as store:
            await begin_run(store, configs, "sample", sampler_settings(configs))
            await begin_model(store, configs[ModelConfig].model_name_or_path, "sample")
            if read is not None and tasks.train_file is not None:
                await load_read_tasks(store, tasks.train_file, read)
            _require_order(tasks.task_selection, bool(await store.mixtures.sources()))
            for line in await store.mixtures.unreachable(tasks.num_train_epochs):
                logger.warning("%s", line)
            if sampling.resample_error_records:
                await store.claims.reopen_failed(TRAIN_SPLIT)
            await allow_configured_imports(store, configs)
            async with open_worker(store, configs, stop=stop, trains=True, chat_format=chat_format) as (
                worker,
                router,
            ):
                # Freeze only now: tokenizer, template and tools exist, and later collections leave them out.
                collect_garbage_less_often()
                await probe(
                    store, worker.tools, sampling, TRAIN_SPLIT, groups, configs[AgentConfig],
                    chat_format=worker.chat_format,
                )  # fmt: skip
                await store.imports.add(names_outside({groups.group_filter or "", groups.advantage}))
                await store.settings.begin("chat", worker.chat_format.agreed_settings, "sample")
                finalizer = GroupFinalizer(store, groups, split=TRAIN_SPLIT, seed=run.seed)

                async def groups_allowed() -> GroupLimit:
                    return await admission.groups_allowed(store, router.engines.policy_versions())

                sampler = Sampler(store, worker, finalizer, config, groups_allowed)
                limit = CostLimit(store, prices, sampling.max_cost)
                jobs = [
                    _stay_listed(store, config.owner, stop, lambda: sampler.doing),
                    limit.watch(stop), watch_gold(store, gold, sampling, config.owner),
                ]  # fmt: skip
                if sampling.target_concurrency == "auto":
                    most = admission.most_groups * tasks.num_generations
                    target = TargetConcurrency(config.concurrency, max(most, config.concurrency))
                    jobs.append(
                        _find_concurrency(
                            store, router, sampler, target, configs[EngineConfig].heartbeat_seconds
                        )
                    )
                async with background(*jobs):
                    await sampler.run(stop, at_once)
                limit.check()


def _require_order(selection: str, is_mixed: bool) -> None:
    """Raise ConfigError for another selection of tasks than a mixture's own."""
    require(
        selection == ORDER or not is_mixed,
        f"--task_selection is {selection}, and the tasks of the run are a mixture",
        "leave it out: the mixture's weights, gates and pools select the tasks",
    )


async def _find_concurrency(
    store: Store, router: EngineRouter, sampler: Sampler, target: TargetConcurrency, every: float
) -> None:
    """Let ``sampler`` run as many trajectories as ``target`` says; look each ``every`` seconds."""
    asked_at, ended, share, samplers = -math.inf, 0, 1.0, 1
    while True:
        with log_store_errors(logger, "the engines cannot be listed; the concurrency stays", outages=True):
            await router.engines.refresh()
            if time.monotonic() - asked_at >= WINDOW_SECONDS:
                asked_at = time.monotonic()
                claims = [each.claims for each in await store.samplers.all() if each.is_alive and each.claims]
                samplers, share = max(1, len(claims)), min(1.0, sampler.running / max(1, sum(claims))) or 1.0
            held, tokens = router.held()
            silent = target.observe(
                router.engines.listed(), held=held, tokens=tokens, running=sampler.running,
                ended=sampler.ended - ended, share=share, samplers=samplers,
            )  # fmt: skip
            ended = sampler.ended
            for url in silent:
                logger.warning(
                    "%s reports no metrics: the number of trajectories there stays, as without"
                    " --target_concurrency auto (SGLang: --engine_args=--enable-metrics; vLLM: no"
                    " --disable-log-stats)", url
                )  # fmt: skip
            router.limits = target.limits
            sampler.resize(target.number, target.why)
        await asyncio.sleep(every)


_COST_SECONDS = 15.0
"""Interval at which a sampler with ``--max_cost`` adds up what the run has cost."""


@dataclass(slots=True)
class CostLimit:
    """Stops a sampler when its run has cost ``--max_cost``."""

    store: Store
    prices: Prices | None
    max_cost: float | None
    spent: float = 0.0

    async def watch(self, stop: asyncio.Event) -> None:
        """Set ``stop`` once the limit is reached; the sampler then drains as after a signal."""
        while self.max_cost is not None and not stop.is_set():
            with log_store_errors(logger, "what the run costs could not be read", outages=True):
                self.spent = (await Costs(self.store.connection).read(self.prices)).total or 0.0
            if self.spent >= self.max_cost:
                logger.warning(
                    "the run has cost %.4g, and may cost %g: sampling ends", self.spent, self.max_cost
                )
                stop.set()
            await wait_for_any(stop, timeout=_COST_SECONDS)

    def check(self) -> None:
        """Raise CostLimitError if the limit was reached."""
        if self.max_cost is not None and self.spent >= self.max_cost:
            raise CostLimitError(
                f"the run has cost {self.spent:.4g}, and --max_cost is {self.max_cost:g}",
                hint="what was sampled is kept; a higher --max_cost goes on from there",
            )


async def _stay_listed(store: Store, owner: str, stop: asyncio.Event, doing: Callable[[], Doing]) -> None:
    """List the sampler ``owner`` and what it does until cancelled; set ``stop`` if it is to drain.

    An outage of the database is only logged: an error would cancel the sampler while it releases its claims.
    """
    host, pid = socket.gethostname(), os.getpid()
    with log_store_errors(logger, "samplers that died stay listed", outages=True):
        await store.samplers.sweep()
    try:
        while True:
            was_stopping = stop.is_set()
            with log_store_errors(logger, "the heartbeat of this sampler could not be sent", outages=True):
                asked_by = await store.samplers.beat(
                    owner, host=host, pid=pid, is_draining=was_stopping, doing=doing()
                )
                if asked_by is not None and not was_stopping:
                    logger.info("this sampler drains", extra={"by": asked_by})
                    stop.set()
            if was_stopping:
                await asyncio.sleep(SAMPLER_BEAT_SECONDS)
            else:
                # Wake at ``stop``, so that lists show at once that this sampler drains.
                await wait_for_any(stop, timeout=SAMPLER_BEAT_SECONDS)
    finally:
        await bounded(store.samplers.end(owner))
