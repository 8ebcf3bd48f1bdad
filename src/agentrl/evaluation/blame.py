"""Estimate how far each trained trajectory moved the score of held-out tasks between two evaluations."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.config.agreement import public_flags
from agentrl.config.blame import BlameConfig
from agentrl.config.load import Configs
from agentrl.config.schema import RunConfig, TrainConfig
from agentrl.config.whatif import parent_configs
from agentrl.data.freshness import VersionSteps, weigh
from agentrl.data.step_source import images_of
from agentrl.documents.checkpoint import Checkpoint
from agentrl.documents.run import Evaluation
from agentrl.documents.training import DBRecordData, TrainStep
from agentrl.errors import ConfigError
from agentrl.evaluation.blame_weights import (
    Weights,
    assign_weights,
    available_weights,
    build_at,
    local_folder,
)
from agentrl.evaluation.changed_tasks import ChangedTask, changed_tasks, held_out_data
from agentrl.evaluation.progress import Progress
from agentrl.evaluation.report import find
from agentrl.store.client import open_existing
from agentrl.store.records import RecordOrigin
from agentrl.train.influence import Direction, Images, influences, likelihood_direction
from agentrl.train.source import freshness_of
from agentrl.train.step import PolicyTrainer
from agentrl.train.whatif import stored_flags
from agentrl.weights.local_copy import LocalCopy, weights_dir

if TYPE_CHECKING:
    from agentrl.store.client import Store

_ONE_PROCESS = {
    "tp_size": 1, "pp_size": 1, "cp_size": 1, "ep_size": 1, "torch_compile": False, "publish": "full",
    "token_statistics_mib": 0.0,
}  # fmt: skip
"""Flags of the run that differ here: one process computes, and publishes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One trained trajectory, and its estimated part of the change of the held-out score."""

    record: str
    task: str
    step: int
    """The last step that trained it."""
    score: float
    advantage: float
    """The mean over its trained tokens, as that step trained them: whitened, old tokens decayed."""
    scorer: str | None
    tools: tuple[str, ...]
    min_version: int
    max_version: int
    effect: float
    """Score: positive if it moved the tasks as they changed. Of tasks that fell, this is the blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What ``blame`` found. ``effects`` are sorted, the largest first."""

    a: Evaluation
    b: Evaluation
    tasks: tuple[ChangedTask, ...]
    """The tasks whose change is explained."""
    measured: float
    """Σ weight · change of these tasks, where a task's weight is its share of the absolute change."""
    effects: tuple[Effect, ...]
    steps: tuple[int, ...]
    weights: tuple[int, ...]
    """The steps after which the weights were saved at which gradients were computed."""
    is_scaled: bool
    """Whether gradients were scaled by AdamW's moments."""
    missing: int
    """Trained trajectories whose training data are deleted."""

    @property
    def estimated(self) -> float:
        """Return the part of ``measured`` that the trajectories explain to first order."""
        return sum(item.effect for item in self.effects)


async def blame(configs: Configs, named_a: str, named_b: str, progress: Progress) -> Blame:
    """Return the effect of each trajectory that the run trained between evaluations A and B.

    ``configs`` has a BlameConfig too; flags of the trainer that are not given are those of the run. Raises
    ConfigError if A is not before B, if no task changed as ``--changes`` says, or if no step lies between.
    """
    async with await open_existing(configs[RunConfig]) as store:
        flags = configs[BlameConfig]
        configs = await _configs_of_run(store, configs)
        a, b = await find(store, named_a), await find(store, named_b)
        steps = await _steps_between(store, a, b)
        tasks = await changed_tasks(store, configs, a, b, flags.changes)
        held_out = await held_out_data(store, configs, (a, b), tasks)
        available = await available_weights(store, configs)
        plan = assign_weights(steps, available, flags.checkpoints)
        measuring = _Measuring(
            store=store,
            configs=configs,
            progress=progress,
            steps=steps,
            held_out=held_out,
            moments=[item.checkpoint for item in available if item.checkpoint and flags.adam_scale],
        )
        effects: dict[str, Effect] = {}
        missing = 0
        for weights, chosen in plan.items():
            found, lost = await measuring.at(weights, chosen)
            gc.collect()  # the trainer, before the next one is loaded
            missing += lost
            for item in found:
                before = effects.get(item.record)
                more = 0.0 if before is None else before.effect
                effects[item.record] = replace(item, effect=item.effect + more)
    if not effects:
        raise ConfigError(
            f"the training data of steps {steps[0].step} to {steps[-1].step} are deleted",
            hint="blame reads tokens and advantages; `agentrl db prune` deletes them",
        )
    return Blame(
        a=a,
        b=b,
        tasks=tuple(tasks),
        measured=sum(task.change**2 for task in tasks) / sum(abs(task.change) for task in tasks),
        effects=tuple(sorted(effects.values(), key=lambda item: (-item.effect, item.record))),
        steps=tuple(step.step for step in steps),
        weights=tuple(weights.step for weights in plan),
        is_scaled=bool(measuring.moments),
        missing=missing,
    )


async def _configs_of_run(store: Store, here: Configs) -> Configs:
    """Return the flags of the run's trainer, with those that are given here, for one process."""
    stored, given = await stored_flags(store), public_flags(here)
    output = given["output_dir"] or stored.values.get("output_dir")
    own = {name: given[name] for name in here.given & given.keys()}
    flags = own | {"output_dir": output} | _ONE_PROCESS
    return parent_configs(stored.values, stored.given, here).with_flags(flags)


async def _steps_between(store: Store, a: Evaluation, b: Evaluation) -> list[TrainStep]:
    """Return the committed steps after the version of A, up to that of B."""
    if a.step is None or b.step is None:
        item = a if a.step is None else b
        raise ConfigError(
            f"{item.id} evaluates a model folder, and no step of the run leads to it",
            hint="name evaluations of two versions of the run (--eval_version)",
        )
    if a.step >= b.step:
        raise ConfigError(
            f"{a.id} is of step {a.step}, and {b.id} of step {b.step}: no step lies between",
            hint="name the evaluation of the earlier version first",
        )
    steps = [item for item in await store.steps.find(after=a.step) if item.step <= (b.step or 0)]
    recorded = next((item.recorded for item in steps if item.recorded is not None), None)
    if recorded is not None:
        raise ConfigError(
            f"run {store.run_name!r} is a what-if: it has no training data of its own",
            hint=f"blame evaluations of {recorded.run}, whose data it trained again",
        )
    if not steps:
        raise ConfigError(
            f"run {store.run_name!r} has no committed step from {a.step + 1} to {b.step}",
            hint="name evaluations of versions that this run trained",
        )
    return steps


@dataclass(frozen=True, kw_only=True)
class _Measuring:
    """Measures how far the trajectories of steps moved the held-out tasks, at one set of weights a time."""

    store: Store
    configs: Configs
    progress: Progress
    steps: Sequence[TrainStep]
    """All steps between the evaluations."""
    held_out: tuple[Sequence[DBRecordData], Images]
    """The trajectories of the tasks, with advantages along which the tasks change as they did."""
    moments: Sequence[Checkpoint]
    """Checkpoints with AdamW's moments; empty if gradients are not scaled."""

    async def at(self, weights: Weights, steps: Sequence[TrainStep]) -> tuple[list[Effect], int]:
        """Return the effects of the trajectories of ``steps``, and how many have no training data left."""
        where, until = f"the weights of step {weights.step}", self.progress.until
        trainer = await until(f"loading {where}", self._load(weights))
        direction = await until(f"held-out tasks at {where}", asyncio.to_thread(self._direction, trainer))
        effects: list[Effect] = []
        missing = 0
        for step in steps:
            what = f"step {step.step}, {self.steps.index(step) + 1} of {len(self.steps)}, at {where}"
            found, lost = await until(what, self._of_step(step, trainer, direction))
            effects += found
            missing += lost
        return effects, missing

    async def _load(self, weights: Weights) -> PolicyTrainer:
        """Return the run's trainer with ``weights`` and the moments nearest to them."""
        nearest = min(self.moments, key=lambda item: abs(item.state.step - weights.step), default=None)
        copy = LocalCopy(await weights_dir(self.store, None) / "blame", is_exact=True)
        folder = await local_folder(self.store, weights, copy)
        try:
            return await asyncio.to_thread(build_at, self.configs, folder, weights, nearest)
        finally:
            copy.release()

    def _direction(self, trainer: PolicyTrainer) -> Direction:
        direction = likelihood_direction(trainer, *self.held_out)
        return direction.scaled_by(trainer.optimizer) if self.moments else direction

    async def _of_step(
        self, step: TrainStep, trainer: PolicyTrainer, direction: Direction
    ) -> tuple[list[Effect], int]:
        stored, _ = await self.store.training.fetch_readable(step.data)
        data = [stored[key] for key in step.data if key in stored]
        if not data:
            return [], len(step.data)
        versions = {span.version for item in data for span in item.spans}
        ages = await VersionSteps(self.store).ages(versions, step.step - 1)
        whitens = self.configs[TrainConfig].advantage_whitening == "batch"
        weighed = weigh(data, ages, freshness_of(self.configs), whitens=whitens)
        images = await images_of(self.store, data)
        found = await asyncio.to_thread(influences, trainer, weighed, direction, ages, images)
        origins = await self.store.records.origins([item.record for item in data])
        scale = _learning_rate(step, trainer.max_grad_norm)
        effects = [_effect(item, step, scale * found[item.id], origins) for item in weighed]
        return effects, len(step.data) - len(data)


def _learning_rate(step: TrainStep, max_grad_norm: float) -> float:
    """Return the learning rate of a step times the factor by which its gradient was clipped."""
    norm = float(step.metrics.get("grad_norm") or 0.0)
    clip = min(1.0, max_grad_norm / norm) if norm > 0 else 1.0
    return float(step.metrics.get("lr", 1.0)) * clip


def _effect(
    item: DBRecordData, step: TrainStep, effect: float, origins: Mapping[str, RecordOrigin]
) -> Effect:
    origin = origins.get(item.record)
    sizes = [(span.end - span.start, span) for span in item.spans]
    return Effect(
        record=item.record,
        task=item.task,
        step=step.step,
        score=item.score,
        advantage=sum(size * span.advantage for size, span in sizes) / (item.trainable_tokens or 1),
        scorer=None if origin is None else origin.scorer,
        tools=() if origin is None else origin.tools,
        min_version=item.min_version,
        max_version=item.max_version,
        effect=effect,
    )
