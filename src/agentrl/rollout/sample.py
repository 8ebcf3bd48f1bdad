"""``agentrl sample``: a sampler process; start as many as you like, anywhere."""

from __future__ import annotations

import asyncio

from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.validate import require_trainable


def main(argv: list[str]) -> int:
    """Run a sampler until its work is done or it is told to stop."""
    configs = parse(
        argv,
        command="agentrl sample",
        description="Claims tasks of the run, runs and scores their trajectories, finalizes groups.",
        shown=[RunConfig, ModelConfig, TaskConfig, SamplingConfig, AgentConfig, ClaimConfig, GroupConfig],
        validate=require_trainable,
    )
    from agentrl.observe.logging import setup

    setup(configs[RunConfig], "sample")
    asyncio.run(_sample(configs))
    return 0


async def _sample(configs: Configs) -> None:
    from agentrl.rollout.setup import stop_on_signals
    from agentrl.store.retry import retry_outages

    stop = stop_on_signals()
    with retry_outages(configs[RunConfig].db_wait_seconds, stop):
        await _sample_until(stop, configs)


async def _sample_until(stop: asyncio.Event, configs: Configs) -> None:
    from agentrl.config.facts import sampler_facts
    from agentrl.observe.begin_run import begin_model, begin_run
    from agentrl.registry import paths_among
    from agentrl.rollout.admission import Admission
    from agentrl.rollout.finalizer import TRAIN_SPLIT, GroupFinalizer
    from agentrl.rollout.probe import probe, require_groups
    from agentrl.rollout.sampler import EpochPlan, Sampler, SamplerConfig
    from agentrl.rollout.setup import load_tasks, open_worker, owner_name, require_extensions
    from agentrl.store.client import open_store
    from agentrl.store.selection import PASS_RATE, Selection

    run, tasks, sampling = configs[RunConfig], configs[TaskConfig], configs[SamplingConfig]
    groups = configs[GroupConfig]
    require_extensions(configs)
    if tasks.train_file is not None:
        require_groups(groups, tasks.num_generations)
    async with await open_store(run) as store:
        await begin_run(store, configs, "sample", sampler_facts(configs))
        await begin_model(store, configs[ModelConfig].model_name_or_path, "sample")
        if tasks.train_file is not None:
            await load_tasks(
                store, run, tasks, tasks.train_file,
                split=TRAIN_SPLIT, num_generations=tasks.num_generations,
            )  # fmt: skip
        if sampling.resample_error_records:
            await store.claims.reopen_failed(TRAIN_SPLIT)
        async with open_worker(store, configs, stop=stop) as (worker, router):
            await probe(store, worker.tools, sampling, TRAIN_SPLIT, groups)
            await store.imports.add(paths_among({groups.group_filter or "", groups.advantage}))
            await store.settings.begin("chat", worker.renderer.facts, "sample")
            admission = Admission(sampling, configs[TrainConfig])
            sampler = Sampler(
                store,
                worker,
                GroupFinalizer(store, groups, split=TRAIN_SPLIT, seed=run.seed),
                SamplerConfig(
                    split=TRAIN_SPLIT,
                    owner=owner_name(),
                    concurrency=sampling.max_concurrent_samples_per_process * sampling.target_concurrency,
                    claims=configs[ClaimConfig],
                    plan=EpochPlan(
                        epochs=tasks.num_train_epochs,
                        seed=run.seed,
                        num_generations=tasks.num_generations,
                        shuffle=tasks.shuffle_tasks,
                    ),
                    selection=(
                        Selection(tasks.num_train_epochs) if tasks.task_selection == PASS_RATE else None
                    ),
                    idle_exit_seconds=sampling.idle_exit_seconds,
                ),
                lambda: admission.groups_allowed(store, router.policy_versions()),
            )
            await sampler.run(stop)
