"""Assemble a worker and a sampler from flags: chat format, sampling parameters, engines, tools, signals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.model_folder import model_context_length, tokenizer_fingerprint
from agentrl.chat.open_format import open_chat_format
from agentrl.chat.parsers.arguments import load_validator
from agentrl.chat.parsers.base import PARSERS
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
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.environments.harbor.machine import use_containers
from agentrl.errors import ModelError
from agentrl.inference.engine import Router
from agentrl.inference.engine_list import LiveEngines
from agentrl.inference.session import EngineRouter
from agentrl.permissions import allow
from agentrl.registry import import_modules
from agentrl.rollout.agent_io import Endpoint, agent_cfg_path
from agentrl.rollout.agents import check_agent
from agentrl.rollout.context import CONTEXT_MANAGERS
from agentrl.rollout.held_claims import owner_name
from agentrl.rollout.housekeeping import EpochPlan
from agentrl.rollout.outages import Outages
from agentrl.rollout.prompts import context_problem
from agentrl.rollout.sampler import SamplerConfig
from agentrl.rollout.worker import Worker
from agentrl.scoring.advantages import ESTIMATORS
from agentrl.store.selection import Selection
from agentrl.tools.browse import open_browse_agent
from agentrl.tools.pool import ToolPool
from agentrl.weights.folder import replayed_experts
from agentrl.weights.local_copy import model_files, weights_dir

if TYPE_CHECKING:
    from agentrl.gateway.host import GatewayHost
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


def max_model_len(model: ModelConfig, folder: str) -> int | None:
    """Return ``--max_model_len``, or the context length in the configuration of the model in ``folder``."""
    return model.max_model_len or model_context_length(folder)


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
    lengths = [max_model_len(configs[ModelConfig], folder)]
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
    """Raise ConfigError for an extension that the flags name and that cannot be found.

    Call it before the run stores its flags, and before tasks are read: it says what runs their containers.
    """
    use_containers(configs[ContainerConfig])
    import_modules(configs[TaskConfig].imported_modules)
    agent = configs[AgentConfig]
    check_agent(agent.agent_name, agent_cfg_path(None, agent.agent_cfg_path))
    CONTEXT_MANAGERS.get(agent.new_context)
    if agent.tool_call_parser is not None:
        PARSERS.get(agent.tool_call_parser)
    ESTIMATORS.get(configs[GroupConfig].advantage)


async def allow_configured_imports(store: Store, configs: Configs) -> None:
    """Restrict imports to the modules that this process's flags and the run's Imports document name."""
    agent, groups = configs[AgentConfig], configs[GroupConfig]
    own = {agent.agent_name, agent.new_context, groups.advantage}
    own.update(name.strip() for name in configs[ToolConfig].tools.split(","))
    own.update(name for name in (agent.tool_call_parser, groups.group_filter) if name is not None)
    allow(configs[TaskConfig].allowed_names | own)
    allow(await store.imports.paths())


def sampler_config(
    configs: Configs,
    split: str,
    *,
    epochs: int,
    selection: Selection | None = None,
    idle_exit_seconds: float | None = None,
) -> SamplerConfig:
    """Return the settings of a sampler of ``split``, under a new owner name."""
    tasks, sampling = configs[TaskConfig], configs[SamplingConfig]
    return SamplerConfig(
        split=split,
        owner=owner_name(),
        concurrency=sampling.max_concurrent_samples_per_process * sampling.target_concurrency,
        scorings=sampling.max_concurrent_scorings,
        claims=configs[ClaimConfig],
        plan=EpochPlan(
            epochs=epochs,
            seed=configs[RunConfig].seed,
            num_generations=tasks.num_generations,
            shuffle=tasks.shuffle_tasks,
        ),
        selection=selection,
        idle_exit_seconds=idle_exit_seconds,
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
        self, claim: Claim, *, train: str, max_calls: int, takes_reward: bool = True
    ) -> AsyncIterator[Endpoint]:
        """Return the endpoint of a trajectory."""
        if self.host is None:
            from agentrl.gateway.answerer import Answerer
            from agentrl.gateway.host import GatewayHost

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
            claim, train=train, max_calls=max_calls, takes_reward=takes_reward
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
) -> AsyncIterator[tuple[Worker, EngineRouter]]:
    """Open a worker with its dependencies; ``live`` lists its engines, by default all live ones of the run.

    Its agents and its gateway get their engines from what ``wrap`` returns for the router over these. Tool
    servers that are down are left to ``LateServers``. ``stop`` is the event that signals to this process set.
    ``trains`` is that of ``open_router``. Raises ToolServerConfigError for a server that cannot be used as it
    is configured.
    """
    agent, sampling = configs[AgentConfig], configs[SamplingConfig]
    chat_format, folder = await open_format(store, configs), await model_folder(store, configs)
    params = sampling_params(sampling, chat_format)
    outages = Outages(sampling.outage_wait_seconds)
    live = live or (lambda: live_engines(store, configs[EngineConfig]))
    router = open_router(live, configs, chat_format, folder, outages, trains=trains)
    engines = wrap(router)
    tools = ToolPool(configs[ToolConfig], open_browse_agent(sampling.agent_config_path))
    gateway = SamplerGateway(
        store=store, configs=configs, router=engines, chat_format=chat_format, params=params
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.close)
        stack.callback(outages.close)
        stack.push_async_callback(tools.close)
        stack.push_async_callback(gateway.close)
        await router.engines.refresh()
        if (problem := context_problem(agent, sampling, router.engines.context_length)) is not None:
            logger.warning("%s", problem)
        await tools.open_reachable()
        load_validator()
        worker = kind(
            store=store, router=engines, tools=tools, chat_format=chat_format, params=params,
            seed=configs[RunConfig].seed, agent=agent, sampling=sampling, claims=configs[ClaimConfig],
            stop=stop or asyncio.Event(), outages=outages, gateway=gateway,
            environment_timeout=configs[ToolConfig].tool_timeout_seconds,
        )  # fmt: skip
        yield worker, router
