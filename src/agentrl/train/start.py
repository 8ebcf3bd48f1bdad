"""Start a run's trainer, or resume it: join the run, find the checkpoint, build what trains, and train."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.load import Configs
from agentrl.config.schema import (
    AdapterConfig,
    ClaimConfig,
    EngineConfig,
    GroupConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from agentrl.data.stream import DataStream
    from agentrl.distributed.world import World
    from agentrl.documents.training import TrainStep
    from agentrl.store.client import Store
    from agentrl.train.checkpoint import Checkpoint
    from agentrl.train.controller import Controller
    from agentrl.train.resume import Progress
    from agentrl.train.step import PolicyTrainer

logger = logging.getLogger(__name__)


def run_trainer(configs: Configs) -> None:
    """Train until the end of the data or ``--max_steps``, or until SIGTERM or SIGINT; every rank calls it."""
    from agentrl.distributed.world import launched_world

    with launched_world() as world:
        if world.rank > 0:
            _follow(configs, world)
        else:
            asyncio.run(_train(configs, world))


def _follow(configs: Configs, world: World) -> None:
    """Execute rank 0's commands until it ends; rank 0 alone handles signals."""
    from agentrl.train.controller import follow

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    follow(world, partial(_build, configs, world))


async def _train(configs: Configs, world: World) -> None:
    from agentrl.store.retry import retry_outages

    stop = _stop_on_signals()
    with retry_outages(configs[RunConfig].db_wait_seconds, stop):
        await _train_until(stop, configs, world)


async def _train_until(stop: asyncio.Event, configs: Configs, world: World) -> None:
    from agentrl.atomic_folder import remove_leftovers
    from agentrl.observe.live import StepView
    from agentrl.observe.trackers import open_trackers
    from agentrl.train import resume
    from agentrl.train.checkpoint import set_aside
    from agentrl.train.lease import hold
    from agentrl.train.loop import Trainer
    from agentrl.train.saving import Saver

    run, config = configs[RunConfig], configs[TrainConfig]
    output = Path(run.output)
    async with (
        await _join(configs) as store,
        hold(store, configs[ClaimConfig].lease_seconds, stop) as lease,
    ):
        fallback = Path(config.fallback_output_dir) / run.run_name if config.fallback_output_dir else None
        roots = [output] if fallback is None else [output, fallback]
        await asyncio.to_thread(_check_space, configs, output, roots[1:])
        for folder in (*roots, output / "weights"):
            await asyncio.to_thread(remove_leftovers, folder)
        steps = await store.training.steps(status=None)
        total_steps = await _total_steps(store, configs)
        discarded = (await store.trainer_lease.read()).discarded
        controller, found = await asyncio.to_thread(
            _prepare, configs, roots, total_steps, steps, discarded, world
        )
        replays = config.resume_from_checkpoint == "auto"
        progress = await resume.begin(
            store, controller.policy.base, found, steps, attempt=lease.attempt, replays=replays
        )
        await lease.check()
        for root in roots:
            await asyncio.to_thread(set_aside, root, progress.train_steps, lease.attempt)
        logger.info(
            "training from step %d, policy version %d%s",
            progress.step, progress.version, f" ({found.folder})" if found else "",
        )  # fmt: skip
        tracker = open_trackers(config.report_to, run, output, _parameters(configs))
        trainer = Trainer(
            store=store,
            run_name=run.run_name,
            config=config,
            controller=controller,
            saver=Saver(
                store=store,
                run_name=run.run_name,
                config=config,
                controller=controller,
                progress=progress,
                lease=lease,
                output=output,
                max_staleness=_max_staleness(configs[SamplingConfig]),
                stop=stop,
                fallback=fallback,
                saved=found.folder if found else None,
                saved_step=progress.step,
            ),
            stream=_stream(store, configs, controller, progress),
            progress=progress,
            lease=lease,
            owner=lease.owner,
            stop=stop,
            view=StepView(max_steps=config.max_steps),
            tracker=tracker,
        )
        try:
            await trainer.run()
        finally:
            tracker.close()
    controller.end()


async def _join(configs: Configs) -> Store:
    """The run's store; ConfigError where these flags contradict what the run was begun with."""
    from agentrl.config.facts import trainer_facts
    from agentrl.losses.settings import LossSettings
    from agentrl.observe.begin_run import begin_model, begin_run
    from agentrl.store.client import open_store

    store = await open_store(configs[RunConfig])
    try:
        facts = trainer_facts(configs, LossSettings.of(configs[LossConfig]))
        resolved = {"dtype": _dtype(configs[ModelConfig]), "output_dir": configs[RunConfig].output}
        await begin_run(store, configs, "train", facts, resolved)
        await begin_model(store, configs[ModelConfig].model_name_or_path, "train")
    except BaseException:
        await store.close()
        raise
    return store


def _prepare(
    configs: Configs,
    roots: Sequence[Path],
    total_steps: int | None,
    steps: Sequence[TrainStep],
    discarded: Sequence[str],
    world: World,
) -> tuple[Controller, Checkpoint | None]:
    """Build the trainer on all ranks as the checkpoint to resume from left it; return both."""
    from agentrl.model.load import base_folder
    from agentrl.train import checkpoint
    from agentrl.train.controller import lead

    candidates = [
        checkpoint.find(
            root,
            configs[TrainConfig].resume_from_checkpoint,
            steps,
            run_name=configs[RunConfig].run_name,
            base=base_folder(configs[ModelConfig]),
            discarded=discarded,
        )
        for root in roots
    ]
    complete = [candidate for candidate in candidates if candidate is not None]
    found = max(complete, key=lambda candidate: candidate.state.step, default=None)
    return lead(world, partial(_build, configs, world), found, total_steps), found


def _build(
    configs: Configs, world: World, found: Checkpoint | None, total_steps: int | None
) -> PolicyTrainer:
    from agentrl.train import checkpoint
    from agentrl.train.build import Recipe, build_trainer

    recipe = Recipe(
        model=configs[ModelConfig],
        loss=configs[LossConfig],
        optim=configs[OptimConfig],
        train=configs[TrainConfig],
        seed=configs[RunConfig].seed,
        adapter=configs[AdapterConfig],
        memory=configs[MemoryConfig],
    )
    trainer = build_trainer(
        recipe, weights=found.model if found else None, total_steps=total_steps, world=world
    )
    if found:
        checkpoint.restore(found, trainer)
    return trainer


def _stream(store: Store, configs: Configs, controller: Controller, progress: Progress) -> DataStream:
    from agentrl.data.freshness import Freshness
    from agentrl.data.planner import packing_problem
    from agentrl.data.stream import DataStream, StreamSettings
    from agentrl.data.verify import verifier

    sampling, tasks, train = configs[SamplingConfig], configs[TaskConfig], configs[TrainConfig]
    settings = StreamSettings(
        groups_per_step=train.groups_per_step,
        num_epochs=tasks.num_train_epochs,
        freshness=Freshness(
            max_staleness=_max_staleness(sampling),
            policy=train.staleness_policy,
            decay=configs[LossConfig].out_of_date_decay,
        ),
        whitening=train.advantage_whitening,
        wait_seconds=train.data_wait_seconds,
        problem_of=partial(
            packing_problem,
            vocab_size=controller.policy.model.config.get_text_config().vocab_size,
            max_tokens=train.max_tokens,
        ),
        engine_alive_seconds=configs[EngineConfig].alive_seconds,
    )
    verify = verifier(store) if train.verify_data else None
    return DataStream(store, settings, progress.replay, verify=verify, attempt=progress.attempt)


def _dtype(model: ModelConfig) -> str:
    """Return the name of the dtype that ``--dtype`` is on this machine."""
    from agentrl.model.load import resolve_dtype

    return str(resolve_dtype(model.dtype)).removeprefix("torch.")


def _check_space(configs: Configs, output: Path, others: Sequence[Path]) -> None:
    from agentrl.model.load import base_folder
    from agentrl.train.disk_space import check_output, retention

    model = configs[ModelConfig]
    is_adapter = configs[AdapterConfig].lora_rank > 0
    kept = retention(base_folder(model), _dtype(model), configs[TrainConfig], is_adapter=is_adapter)
    check_output(output, kept, others)


def _max_staleness(sampling: SamplingConfig) -> int:
    return 0 if sampling.sync_sampling else sampling.max_staleness


async def _total_steps(store: Store, configs: Configs) -> int | None:
    """Where a falling schedule ends: ``--max_steps``, else the most steps that the tasks can fill."""
    tasks, train = configs[TaskConfig], configs[TrainConfig]
    if train.max_steps > 0:
        return train.max_steps
    per_epoch = await store.tasks.epoch_size("train")
    if per_epoch == 0:
        return None
    return max(1, per_epoch * tasks.num_train_epochs // train.groups_per_step)


def _parameters(configs: Configs) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    groups = (ModelConfig, GroupConfig, LossConfig, OptimConfig, AdapterConfig, MemoryConfig, TrainConfig)
    for group in groups:
        parameters |= vars(configs[group])
    return parameters


def _stop_on_signals() -> asyncio.Event:
    """Set on the first SIGTERM or SIGINT; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask_to_stop(number: signal.Signals) -> None:
        logger.info("%s: finishing the step, saving, leaving", number.name)
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask_to_stop, number)
    return stop
