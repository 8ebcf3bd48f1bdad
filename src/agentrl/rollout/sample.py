"""Run one sampler process: join the run, load and check tasks, then claim until the work is done."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from agentrl.config.agreement import sampler_settings
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AgentConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.data.finalize_group import TRAIN_SPLIT
from agentrl.documents.task_file import ReadResult
from agentrl.observe.begin_run import begin_model, begin_run
from agentrl.permissions import names_outside
from agentrl.processes import stop_on_signals
from agentrl.rollout.finalizer import GroupFinalizer
from agentrl.rollout.housekeeping import collect_garbage_less_often
from agentrl.rollout.load_tasks import load_read_tasks, read_source
from agentrl.rollout.preflight import probe, require_groups
from agentrl.rollout.sampler import Sampler
from agentrl.rollout.setup import allow_configured_imports, open_worker, require_extensions, sampler_config
from agentrl.store.claims import GroupLimit
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics.retry import retry_outages
from agentrl.store.selection import CURRICULUM, ORDER, Selection
from agentrl.weights.folder import require_folder


@dataclass(frozen=True, slots=True)
class Admission:
    """Limit the groups that are being sampled or wait to be trained.

    Groups are trained in the order in which they began. With at most (``max_staleness`` + 1) ×
    ``groups_per_step`` groups open, including the step in progress, a group that begins with the newest
    weights is trained at most ``max_staleness`` steps later. Unpublished weights, and engines that serve
    older ones, reduce this limit by the number of optimizer steps that they lag. ``oversample_groups`` more
    may be open, so that a step does not wait for the slowest groups. Groups that miss their step may become
    stale.
    """

    sampling: SamplingConfig
    training: TrainConfig

    @property
    def max_staleness(self) -> int:
        """Return how many optimizer steps sampling may run ahead: 0 with ``--sync_sampling``."""
        return 0 if self.sampling.sync_sampling else self.sampling.max_staleness

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
            groups += self.sampling.oversample_groups
        return GroupLimit(groups, after_step=trained, engines_lag=served < published)


async def sample(configs: Configs) -> None:
    """Run a sampler until every epoch is finalized, its work runs out, or a signal stops it."""
    run, tasks, sampling, groups = (
        configs[RunConfig], configs[TaskConfig], configs[SamplingConfig], configs[GroupConfig],
    )  # fmt: skip
    config = sampler_config(
        configs,
        TRAIN_SPLIT,
        epochs=tasks.num_train_epochs,
        selection=_selection(tasks),
        idle_exit_seconds=sampling.idle_exit_seconds,
    )
    stop = stop_on_signals()
    with retry_outages(run.db_wait_seconds, stop):
        require_extensions(configs)
        require_folder(configs[ModelConfig])
        read = await _read_tasks(configs)
        async with await open_store(run) as store:
            await _join_run(store, configs, read)
            await allow_configured_imports(store, configs)
            async with open_worker(store, configs, stop=stop, trains=True) as (worker, router):
                collect_garbage_less_often()
                await probe(
                    store, worker.tools, sampling, TRAIN_SPLIT, groups, configs[AgentConfig],
                    chat_format=worker.chat_format,
                )  # fmt: skip
                await store.imports.add(names_outside({groups.group_filter or "", groups.advantage}))
                await store.settings.begin("chat", worker.chat_format.agreed_settings, "sample")
                finalizer = GroupFinalizer(store, groups, split=TRAIN_SPLIT, seed=run.seed)
                admission = Admission(sampling, configs[TrainConfig])
                if sampling.tail_policy == "cut":
                    config = replace(config, cut_after=admission.max_staleness + 1)
                sampler = Sampler(
                    store,
                    worker,
                    finalizer,
                    config,
                    lambda: admission.groups_allowed(store, router.engines.policy_versions()),
                )
                await sampler.run(stop)


def _selection(tasks: TaskConfig) -> Selection | None:
    """Return how tasks are selected; None for the order of the epoch."""
    if tasks.task_selection == ORDER:
        return None
    return Selection(tasks.num_train_epochs, by_level=tasks.task_selection == CURRICULUM)


async def _read_tasks(configs: Configs) -> ReadResult | None:
    """Read and check ``--train_file``; None without one."""
    tasks = configs[TaskConfig]
    if tasks.train_file is None:
        return None
    require_groups(configs[GroupConfig], tasks.num_generations)
    return await read_source(tasks.train_file, tasks, split=TRAIN_SPLIT, seed=configs[RunConfig].seed)


async def _join_run(store: Store, configs: Configs, read: ReadResult | None) -> None:
    """Begin the run or check its settings, load the tasks ``read``, reopen failed slots if asked to."""
    train_file = configs[TaskConfig].train_file
    await begin_run(store, configs, "sample", sampler_settings(configs))
    await begin_model(store, configs[ModelConfig].model_name_or_path, "sample")
    if read is not None and train_file is not None:
        await load_read_tasks(store, train_file, read)
    if configs[SamplingConfig].resample_error_records:
        await store.claims.reopen_failed(TRAIN_SPLIT)
