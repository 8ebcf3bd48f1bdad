"""Start or resume a run's trainer: join the run, load its newest checkpoint, and train."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentrl.base.atomic_folder import remove_leftovers
from agentrl.base.device_lease import DeviceLease, leased_devices
from agentrl.base.folder_owner import foreign, read_owner
from agentrl.base.processes import REPEATED_SECONDS
from agentrl.chat.model_folder import context_length
from agentrl.config.agreement import trainer_settings
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AdapterConfig,
    ClaimConfig,
    CriticConfig,
    EngineConfig,
    GroupConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.training import VERSION_LOGPROBS
from agentrl.data.finalize_group import verifier
from agentrl.data.planner import packing_problem
from agentrl.data.stream import (
    STEP_SOURCES,
    DataStream,
    StepSource,
    StreamSettings,
    freshness_of,
    whitens_data,
)
from agentrl.distributed.accelerate_config import with_launch_settings
from agentrl.distributed.build_policy import step_precision
from agentrl.distributed.mesh import World, launched_world
from agentrl.documents.run import RunSettings
from agentrl.documents.status import TrainerEnd
from agentrl.documents.training import Checkpoint, TrainStep
from agentrl.errors import ConfigError
from agentrl.losses.settings import LossSettings
from agentrl.model.flops import Precision
from agentrl.model.load import resolve_dtype
from agentrl.observe.begin_run import begin_files, begin_model, begin_run, resolved_flags
from agentrl.observe.progress import StepView
from agentrl.observe.tracing import tracing
from agentrl.observe.trackers import open_trackers
from agentrl.store.client import Store, open_store, run_exists
from agentrl.store.mechanics.retry import retry_outages
from agentrl.train import checkpoint
from agentrl.train.build import build_trainer, require_buildable
from agentrl.train.controller import Controller, follow, lead
from agentrl.train.disk_space import check_output, retention
from agentrl.train.folders import RunFolders, place_of, run_folders
from agentrl.train.lease import HeldTrainerLease, hold_lease
from agentrl.train.loop import Trainer
from agentrl.train.optimizer import needs_length, parse_optim_args, schedule_length
from agentrl.train.publishing import DeviceTurns, Progress, Publisher
from agentrl.train.step import PolicyTrainer
from agentrl.weights.folder import base_folder
from agentrl.weights.publish import lost_versions, publish_base
from agentrl.weights.storage import is_remote

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Steps of a run that are trained with the same flags: of a what-if, as its parent's trainer had them."""

    configs: Configs
    last: int | None = None
    """The last step of the parent in this part; None: the rest."""
    threads: int | None = None
    """Those of the parent's trainer; None: it has not stored them."""


def run_trainer(*parts: Part) -> None:
    """Train until the end of the data, ``--max_steps``, SIGTERM or SIGINT; every rank calls it.

    The same processes train the parts, one after the other.
    """
    launched = [with_launch_settings(part.configs) for part in parts]
    with launched_world(base_folder(parts[0].configs[ModelConfig])) as world:
        for part, configs in zip(parts, launched, strict=True):
            if part.threads not in (None, torch.get_num_threads()):
                logger.info("computes with the threads of the trainer that made the steps: %d", part.threads)
                torch.set_num_threads(part.threads)
            if world.rank > 0:
                _follow(configs, world)
                continue
            with tracing(configs, "train"):
                is_whole = asyncio.run(_train(configs, world, part.last))
            # A signal ended it before the model was built, or the steps that come before.
            if is_whole is None or (part.last is not None and not is_whole):
                # Release the other ranks: they wait for the next part to be built.
                world.broadcast("end")
                return


def _follow(configs: Configs, world: World) -> None:
    """Execute rank 0's commands until it ends; rank 0 alone handles signals."""
    # Ignore them: launchers signal every rank, and rank 0's last step needs all of them.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    follow(world, partial(_build, configs, world))


async def _train(configs: Configs, world: World, last: int | None) -> bool | None:
    """Train on all ranks, up to step ``last`` of the parent; return False if a signal ended it.

    Returns None if a signal ended it before the other ranks had anything to do: they wait.
    """
    stop, run, train = _stop_on_signals(), configs[RunConfig], configs[TrainConfig]
    precision = await asyncio.to_thread(step_precision, configs[ModelConfig], train, world)
    with retry_outages(run.db_wait_seconds, stop):
        store, folders, flags = await _join(configs, world, precision, is_agreed=last is None)
        async with store, hold_lease(store, configs[ClaimConfig].lease_seconds, stop) as lease:
            # Ask under the lease: what is trained from half-withdrawn data, no later call finds.
            await store.withdrawals.require_deleted()
            found, steps = await _choose_checkpoint(store, configs, folders)
            await asyncio.to_thread(_check_disk, configs)
            await asyncio.to_thread(_remove_leftovers, folders)
            await lease.record_output(place_of(folders.output))
            total_steps = await _total_steps(store, configs, stop)
            if stop.is_set():
                logger.info("stopped before the first step")
                return None
            # Take it before the model is built there: until then an engine holds its memory.
            device, build = await _take_device(configs), partial(_build, configs, world)
            controller = await asyncio.to_thread(lead, world, build, found, total_steps, precision)
            progress = await roll_back(
                store, lease, controller.policy.base, found, steps,
                replays=train.resume_from_checkpoint == "auto",
            )  # fmt: skip
            # Ask again: loading and rolling back took long, and checkpoints are renamed below.
            await lease.check()
            needed = {Path(child.checkpoint).name for child in await store.ancestry.children()}
            for root in folders.roots:
                await asyncio.to_thread(
                    checkpoint.rename_reverted, root, progress.train_steps, lease.attempt, needed
                )
            logger.info(
                "training from step %d, policy version %d%s",
                progress.step, progress.version, f" ({found.folder})" if found else "",
            )  # fmt: skip
            # Store them this late: a start that fails before has trained no step with its flags.
            await store.settings.start(flags, lease.attempt)
            source = await open_source(store, configs, controller, progress, last)
            publisher = Publisher(
                store=store,
                config=train,
                controller=controller,
                progress=progress,
                lease=lease,
                turns=DeviceTurns(lease=device, controller=controller),
                folders=folders,
                max_staleness=source.max_staleness,
                keeps_sampled=configs[LossConfig].old_logprobs == "version",
                stop=stop,
                saved=found.folder if found else None,
                # Count it as saved: it is the checkpoint's step, or the base model's, which needs none.
                saved_step=progress.step,
            )
            tracker = open_trackers(train.report_to, run, folders.output, _parameters(configs))
            try:
                view = StepView(max_steps=train.max_steps)
                await Trainer(publisher, source, view, tracker).run()
            finally:
                tracker.close()
        controller.end()
    is_finished = lease.ended is TrainerEnd.FINISHED
    if not is_finished:
        logger.info("stopped after step %d: the same command goes on from there", progress.step)
    elif last is None:
        look = f"agentrl status {run.run_name} --once"
        logger.info("finished at step %d; `%s` and `agentrl dashboard` show the run", progress.step, look)
    return is_finished


async def _take_device(configs: Configs) -> DeviceLease | None:
    """Return the lease of a device that engines use too, acquired; None without ``--colocate``."""
    if not configs[EngineConfig].is_colocated:
        return None
    run = configs[RunConfig]
    lease = DeviceLease(leased_devices(run.output), f"the trainer of run {run.run_name}")
    await lease.acquire(urgent=True)
    return lease


async def _require_startable(configs: Configs, world: World) -> None:
    """Raise AgentRLError for flags, folders and disks with which a new run cannot train."""
    run = configs[RunConfig]
    roots = run.checkpoint_roots(configs[TrainConfig].fallback_output_dir)
    for root, flag in zip(roots, ("--output_dir", "--fallback_output_dir"), strict=False):
        found = await asyncio.to_thread(read_owner, root)
        # Ask again: another rank, which starts at the same time, may have begun the run and claimed it.
        if found is not None and not await run_exists(run):
            raise foreign(str(root), found, f"run {run.run_name!r}, which is new", flag)
    await asyncio.to_thread(require_buildable, configs, world)
    await asyncio.to_thread(_check_disk, configs)


def _check_disk(configs: Configs) -> None:
    """Check that what the run keeps fits the disk."""
    model, train = configs[ModelConfig], configs[TrainConfig]
    is_adapter = configs[AdapterConfig].lora_rank > 0
    kept = retention(base_folder(model), _dtype(model), train, is_adapter=is_adapter)
    output, *others = configs[RunConfig].checkpoint_roots(train.fallback_output_dir)
    check_output(output, kept, others)


def _remove_leftovers(folders: RunFolders) -> None:
    """Remove what killed processes left."""
    local = [] if is_remote(folders.versions) else [Path(folders.versions)]
    for folder in (*folders.roots, folders.output / "weights", *local):
        remove_leftovers(folder)


async def _choose_checkpoint(
    store: Store, configs: Configs, folders: RunFolders
) -> tuple[Checkpoint | None, Sequence[TrainStep]]:
    """Choose the checkpoint to resume from, None for the base model, and claim the folders.

    Return it with all steps of the run. Raises ConfigError if the folders lack steps.
    """
    choice = configs[TrainConfig].resume_from_checkpoint
    steps, lease = await store.steps.find(status=None), await store.trainer_lease.read()
    parent, base = await store.ancestry.parent(), base_folder(configs[ModelConfig])

    def choose() -> Checkpoint | None:
        candidates = [
            checkpoint.find(
                root, choice, steps, run_name=folders.owner.run, base=base, discarded=lease.discarded
            )
            for root in folders.roots
        ]
        complete = [candidate for candidate in candidates if candidate is not None]
        first = None
        if parent is not None and parent.checkpoint:
            first = checkpoint.of_parent(Path(parent.checkpoint), base)
        return max(complete, key=lambda candidate: candidate.state.step, default=first)

    found = await asyncio.to_thread(choose)
    if choice == "auto":  # the other choices name what to go back to
        await folders.require_committed(store, lease, found, steps)
    await folders.claim()
    return found, steps


async def roll_back(
    store: Store,
    lease: HeldTrainerLease,
    base: Path,
    found: Checkpoint | None,
    steps: Sequence[TrainStep],
    *,
    replays: bool,
) -> Progress:
    """Go back to a checkpoint; publish the base model as version 0 of a new run.

    ``steps`` are all TrainSteps of the run, read before. With ``replays``, reverted steps are planned again
    with the same data.
    """
    step = found.state.step if found else 0
    await publish_base(store, base, lease.attempt)
    await lease.go_back(step)
    newest = await store.policy_versions.latest()
    published_step = newest.step if newest else 0
    if newest is not None and (lost := await lost_versions(store, newest)):
        # Publish the step again: engines serve older weights, and samplers begin nothing for so old ones.
        logger.warning(
            "version %d is published again: its files are gone from %s", newest.id, newest.location
        )
        await store.policy_versions.mark_pruned(lost, attempt=lease.attempt)
        published_step = -1
    # Take the newest plan of each step: if a trainer dies while it replays, its predecessor's plans stand for
    # the steps that it did not reach.
    plans = sorted((item for item in steps if replays and item.step > step), key=lambda item: item.planned_at)
    return Progress(
        attempt=lease.attempt,
        step=step,
        version=newest.id if newest else 0,
        published_step=published_step,
        train_steps=list(found.state.train_steps) if found else [],
        replay={item.step: item.data for item in plans},
    )


async def open_source(
    store: Store, configs: Configs, controller: Controller, progress: Progress, last: int | None
) -> StepSource:
    """Return the run's live stream; for a what-if, the stored steps of its parent.

    ``last`` is the last step of the parent that is trained with these flags; None: the child's last one.
    Raises ConfigError if this installation cannot train steps of another run.
    """
    parent = await store.ancestry.parent()
    if parent is None or parent.kind == "fork":
        return _stream(store, configs, controller, progress)
    return await STEP_SOURCES.get(parent.kind)(store, parent, configs, progress.train_steps, last)


def _stream(store: Store, configs: Configs, controller: Controller, progress: Progress) -> DataStream:
    tasks, train = configs[TaskConfig], configs[TrainConfig]
    settings = StreamSettings(
        groups_per_step=train.groups_per_step,
        num_epochs=tasks.num_train_epochs,
        freshness=freshness_of(configs),
        max_trained_count=train.max_trained_count,
        whitens=whitens_data(configs),
        wait_seconds=train.data_wait_seconds,
        problem_of=partial(
            packing_problem,
            vocab_size=controller.policy.model.config.get_text_config().vocab_size,
            max_tokens=train.max_tokens,
            context=context_length(configs[ModelConfig], controller.policy.base),
            column=VERSION_LOGPROBS if configs[LossConfig].old_logprobs == "version" else None,
        ),
        engine_alive_seconds=configs[EngineConfig].alive_seconds,
    )
    verify = verifier(store, refuses_roles=configs[CriticConfig].is_on) if train.verify_data else None
    return DataStream(store, settings, progress.replay, verify=verify, attempt=progress.attempt)


async def _join(
    configs: Configs, world: World, precision: Precision, *, is_agreed: bool
) -> tuple[Store, RunFolders, RunSettings]:
    """Open the run's store, find its folders, and resolve the flags.

    Raises ConfigError if a folder is another run's, if the files of a model changed since the run began, or
    if these flags contradict those that the run was begun with. Without ``is_agreed`` the flags are not
    compared: those of the last part are the run's.
    """
    # Check what needs no database before it is opened: a start that must fail begins no run.
    base_folder(configs[ModelConfig])
    parse_optim_args(configs[OptimConfig].optim_args)
    loss = LossSettings.of_run(configs)
    if loss.importance_correction != configs[LossConfig].importance_correction:
        logger.info(
            "rollouts are quantized to %s: the loss corrects for it by --old_logprobs %s"
            " --importance_correction %s, unless either flag is given",
            configs[EngineConfig].rollout_quantization, loss.old_logprobs, loss.importance_correction,
        )  # fmt: skip
    settings = trainer_settings(configs, loss)
    if not await run_exists(configs[RunConfig]):
        await _require_startable(configs, world)
    store = await open_store(configs[RunConfig])
    try:
        train = configs[TrainConfig]
        folders = await run_folders(store, configs[RunConfig], train.fallback_output_dir, train.publish_to)
        if not await store.steps.find(status=None):  # else it is claimed once it is known to hold the steps
            await folders.claim()
        await begin_files(store, configs[ModelConfig])
        resolved = {
            "dtype": _dtype(configs[ModelConfig]),
            "autocast_bf16": precision.autocast_bf16,
            "output_dir": configs[RunConfig].output,
        }
        threads = torch.get_num_threads()
        if is_agreed:
            flags = await begin_run(store, configs, "train", settings, resolved, threads=threads)
            await begin_model(store, configs[ModelConfig].model_name_or_path, "train")
        else:
            flags = resolved_flags(configs, "train", settings, resolved, threads=threads)
    except BaseException:
        await store.close()
        raise
    return store, folders, flags


def _build(
    configs: Configs, world: World, found: Checkpoint | None, total_steps: int | None, precision: Precision
) -> PolicyTrainer:
    trainer = build_trainer(
        configs,
        weights=found.model if found else None,
        total_steps=total_steps,
        world=world,
        precision=precision,
    )
    if found:
        checkpoint.restore(found, trainer)
    return trainer


def _dtype(model: ModelConfig) -> str:
    """Return the name of the dtype that ``--dtype`` is on this machine."""
    return str(resolve_dtype(model.dtype)).removeprefix("torch.")


_TASKS_POLL_SECONDS, _TASKS_REMINDER_SECONDS = 2.0, 60.0


async def _total_steps(store: Store, configs: Configs, stop: asyncio.Event) -> int | None:
    """Return the length of the learning-rate schedule: ``--max_steps``, or as many as the tasks can fill.

    A schedule that depends on it waits until a sampler has begun to load the tasks.
    """
    parent = await store.ancestry.parent()
    if parent is not None and parent.kind == "whatif":  # its tasks are the parent's
        store = store.beside(parent.run)
    tasks, train = configs[TaskConfig], configs[TrainConfig]
    if train.max_steps > 0:
        return train.max_steps
    say_at = time.monotonic()
    last = say_at + train.data_wait_seconds
    while (per_epoch := await store.epochs.size("train")) == 0:
        if not needs_length(configs[OptimConfig]):
            return None
        if stop.is_set():
            return None
        if time.monotonic() >= last:
            raise ConfigError(
                f"no task was loaded within {train.data_wait_seconds:g} s, and --lr_scheduler_type"
                f" {configs[OptimConfig].lr_scheduler_type} or --warmup_ratio depends on their number",
                hint="load tasks (agentrl sample, agentrl tasks load), or give --max_steps",
            )
        if time.monotonic() >= say_at:
            logger.info(
                "waiting for the tasks, which agentrl sample or agentrl tasks load brings: the learning rate"
                " depends on their number; with --max_steps it does not"
            )
            say_at += _TASKS_REMINDER_SECONDS
        await store.wait_for_change("Task", timeout=_TASKS_POLL_SECONDS)
    passes = tasks.num_train_epochs * train.max_trained_count
    return schedule_length(per_epoch, train.groups_per_step, passes)


def _parameters(configs: Configs) -> dict[str, Any]:
    """Return the flags that trackers record as hyperparameters."""
    groups = (
        ModelConfig, GroupConfig, LossConfig, CriticConfig, OptimConfig, AdapterConfig, MemoryConfig,
        TrainConfig,
    )  # fmt: skip
    return {name: value for group in groups for name, value in vars(configs[group]).items()}


def _stop_on_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second one ends the process at once.

    torchrun sends its ranks again the signal that their group has received: both are one request.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask_to_stop(number: signal.Signals) -> None:
        if not stop.is_set():
            logger.info("%s: finishing the step, then saving; another one ends at once", number.name)
            loop.call_later(REPEATED_SECONDS, end_at_once)
        stop.set()

    def end_at_once() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask_to_stop, number)
    return stop
